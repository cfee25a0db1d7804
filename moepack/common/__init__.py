"""Shared by all rooms: errors, digests, sizes, paths, expert keys, the shape of a model."""
