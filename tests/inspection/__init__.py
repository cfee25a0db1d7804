"""Tests of `moepack.inspection`."""
