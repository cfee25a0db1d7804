"""Tests of `moepack.simulation`."""
