"""Caches of experts within a budget of bytes: hits, misses, evictions.

It knows keys and lengths. The bytes themselves belong to the user of a cache: an engine that runs a
model, or a simulator that only counts.
"""
