"""Tests of `moepack.pack.engines`."""
