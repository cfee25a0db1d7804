"""Tests of `moepack.trace.formats`."""
