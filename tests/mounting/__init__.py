"""Tests of `moepack.mounting`."""
