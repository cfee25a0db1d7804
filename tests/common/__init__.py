"""Tests of `moepack.common`."""
