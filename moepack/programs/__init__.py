"""Programs of llama.cpp, which run as they are: the one that we start by default, and its clients.

What brings experts to them is for `pager`.
"""
