"""Tests of `moepack.source`."""
