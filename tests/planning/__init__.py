"""Tests of `moepack.planning`."""
