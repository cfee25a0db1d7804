"""Bytes in files and in memory: backends, buffers, the page cache, copying.

It knows paths, offsets and memory, and nothing of experts; of packs it knows their files, so that
none is written over. A new way to read is a module here that keeps the contract of `backend`.
"""
