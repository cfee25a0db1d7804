"""The words of a command line: groups of commands, llama.cpp's options, mistakes and their answers.

It knows what was typed and what could have been, and runs nothing.
"""
