"""Prove a pack: its structure, its padding, each digest, and each byte against the shards.

It has its own way from the shards to the bytes, so that one mistake cannot hide in the packer and
here: it shares the decoders of the format with the reader, and how the files of a model are named.
"""
