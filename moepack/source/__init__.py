"""The model as it comes: GGUF headers, the shards of one model, and the experts in them.

A header is hostile until it is checked here. Nothing here knows of packs.
"""
