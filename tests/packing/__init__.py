"""Tests of `moepack.packing`."""
