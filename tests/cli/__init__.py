"""Tests of `moepack.cli`."""
