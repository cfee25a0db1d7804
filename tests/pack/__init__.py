"""Tests of `moepack.pack`."""
