"""Simulation: hits and misses of expert caches, had a trace run through them.

It knows traces as steps, the shape of the model, and the policies that running uses as well. Times
on a machine are for forecasts.
"""
