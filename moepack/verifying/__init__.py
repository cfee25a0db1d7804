"""Prove a pack: its structure, its padding, each digest, and each byte against the shards.

It has its own way from the shards to the bytes, and shares the decoders of the format with the
reader and nothing with the packer, so that one mistake cannot hide in both.
"""
