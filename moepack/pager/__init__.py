"""Brings the experts that any llama.cpp program chooses, from outside, while it runs.

A library that is loaded into the program first tells what its routers chose, and maps what it is
told to; all else is decided here: what is read, kept and evicted. It knows nothing of how a program
is started.
"""
