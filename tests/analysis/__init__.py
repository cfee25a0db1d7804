"""Tests of `moepack.analysis`."""
