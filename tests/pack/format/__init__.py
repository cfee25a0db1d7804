"""Tests of `moepack.pack.format`."""
