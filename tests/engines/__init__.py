"""Tests of `moepack.engines`."""
