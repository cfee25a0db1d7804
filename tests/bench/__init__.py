"""Tests of `moepack.bench`."""
