"""Tests of `moepack.traces.simulation`."""
