"""The memory a model takes: its weights and its context by layer, and compute buffers.

Exact if llama.cpp's rules are known, and called assumed if they are not. Placement, and the time to
read all this, are left to others.
"""
