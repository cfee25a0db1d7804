"""Tests of `moepack.packing.copies`."""
