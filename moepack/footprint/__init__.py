"""What a model takes in memory: its weights and its context by layer, and room to compute in.

Exact where llama.cpp's rules are known, and said to be assumed where they are not. Where things are
to lie, and how long it takes to read them, is not known here.
"""
