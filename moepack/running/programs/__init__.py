"""Programs of llama.cpp, which run as they are, with a library loaded into them before their own.

It knows how that library is compiled and kept, which programs can be given one, how they are
started, and how signals, the terminal and exit codes go through; how routed experts become traces.
What the library and moepack share while a program runs is the supervisor's.
"""
