"""Read a pack: find where an expert lies, and bring it into memory, many at a time.

An engine takes this side alone: it needs no GGUF parser, and nothing that only packing needs.
"""
