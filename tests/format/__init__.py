"""Tests of `moepack.format`."""
