"""Tests of `moepack.pack.mounting`."""
