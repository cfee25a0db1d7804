"""What a trace says: working set, reuse, and whether static hotness is worth anything.

It reads traces, and gives figures; how they are written for people is `report`'s.
"""
