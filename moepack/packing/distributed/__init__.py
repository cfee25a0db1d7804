"""Packs that several processes write, on one machine or many, into a folder or a store.

There are no locks: each data file appears whole, and then has a record of its own.
"""
