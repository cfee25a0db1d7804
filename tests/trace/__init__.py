"""Tests of `moepack.trace`."""
