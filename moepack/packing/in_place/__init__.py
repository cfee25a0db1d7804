"""Shards that are turned into a pack, and back, with room for one copy alone.

Each byte is safely on the drive at any moment.
"""
