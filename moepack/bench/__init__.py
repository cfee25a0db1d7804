"""Measure what a drive can do, and what a pack is worth on it, against the shards.

A workload says which experts are read, a replay reads them from both, a verdict says what the
numbers mean. How they are printed is for others.
"""
