"""Tests of `moepack.hotness`."""
