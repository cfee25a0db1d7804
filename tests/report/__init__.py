"""Tests of `moepack.report`."""
