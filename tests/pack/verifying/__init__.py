"""Tests of `moepack.pack.verifying`."""
