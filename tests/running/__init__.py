"""Tests of `moepack.running`."""
