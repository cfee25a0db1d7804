"""Tests of `moepack.verifying`."""
