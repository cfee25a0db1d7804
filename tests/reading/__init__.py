"""Tests of `moepack.reading`."""
