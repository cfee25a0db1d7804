"""Tests of `moepack.traces`."""
