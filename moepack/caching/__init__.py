"""Caches of experts: what stays within a budget of bytes, and what is given up for what comes.

It knows keys and lengths. Where the bytes are, and how they are read, is for who uses a cache: an
engine that runs a model, or a simulator that only counts.
"""
