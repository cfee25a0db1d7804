"""Tests of `moepack.packing.in_place`."""
