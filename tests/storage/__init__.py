"""Tests of `moepack.storage`."""
