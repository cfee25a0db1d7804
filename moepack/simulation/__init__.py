"""Simulation: what caches of experts would have hit, had a trace run through them.

It knows traces as steps, the shape of the model, and the policies that running uses as well. It
measures nothing: what its answers mean on a machine is for forecasts to say.
"""
