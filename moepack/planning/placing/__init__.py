"""Placement: weights, context and experts on the memories of a machine, as a command line.

It takes bytes from footprints and figures from machines. How fast a placement is, forecasts say.
"""
