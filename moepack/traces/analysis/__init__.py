"""Analysis of traces: working set, reuse, and the worth of static hotness.

It reads traces and gives figures; `report` writes them for people.
"""
