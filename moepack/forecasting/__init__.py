"""How fast a model will run: what a token reads, what reading takes on a machine, how sure that is.

Takes a model's bytes, a machine's figures, receipts of real runs and what a cache misses from the
rooms that know them. Measures nothing, and places nothing.
"""
