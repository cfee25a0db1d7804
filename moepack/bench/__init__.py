"""Measurements of drives and machines, and of the gain of a pack.

A workload says which experts are read, layouts where they lie, rounds compare them in pairs, and a
verdict judges the ratios. Whole programs are compared by `engine_speed`.
"""
