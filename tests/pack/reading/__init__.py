"""Tests of `moepack.pack.reading`."""
