"""Tests of `moepack.planning.footprint`."""
