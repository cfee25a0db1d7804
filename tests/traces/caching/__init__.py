"""Tests of `moepack.traces.caching`."""
