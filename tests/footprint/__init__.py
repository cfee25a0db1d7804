"""Tests of `moepack.footprint`."""
