"""Tests of `moepack.bench.diagnosis`."""
