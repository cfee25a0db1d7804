"""Packs: their format, reading and verifying them, files for other engines, mounted shards."""
