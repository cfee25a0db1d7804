"""Tests of `moepack.traces.formats`."""
