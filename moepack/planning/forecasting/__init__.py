"""The speed of a model on a machine: bytes read for a token, the time they take, and its range.

Takes a model's bytes, a machine's figures, measured runs and the misses of caches from the rooms
that know them. Measures nothing, and places nothing.
"""
