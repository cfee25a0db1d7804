"""A pack under an unpatched llama.cpp: its experts are read when a router has chosen them.

It brings packs, caches and llama.cpp together. What a step gives up is for `caching`, how bytes are
read for `reading`.
"""
