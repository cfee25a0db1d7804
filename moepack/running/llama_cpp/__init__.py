"""One exact llama.cpp, as its wheel carries it: bound through ctypes, checked, called from Python.

It knows nothing of traces, packs or caches: recording is built on it.
"""
