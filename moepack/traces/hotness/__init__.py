"""Hotness: how often each expert was chosen, counted from traces, kept in a file.

What hotness is used for (an order, pinning, a forecast) is decided in other rooms.
"""
