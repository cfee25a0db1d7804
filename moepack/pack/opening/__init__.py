"""A model by its path: a pack, or the shards of a GGUF seen as one, with an index in memory.

It knows the source and the format, and writes nothing; reading experts is the room before it.
"""
