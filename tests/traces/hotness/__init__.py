"""Tests of `moepack.traces.hotness`."""
