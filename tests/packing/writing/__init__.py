"""Tests of `moepack.packing.writing`."""
