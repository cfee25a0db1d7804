"""Tests of `moepack.traces.analysis`."""
