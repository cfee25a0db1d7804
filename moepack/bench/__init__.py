"""Measure: what a drive can do, and what a pack is worth on it, against the shards."""
