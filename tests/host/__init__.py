"""Tests of `moepack.host`."""
