"""Tests of `moepack.packing.plan`."""
