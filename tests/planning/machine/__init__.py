"""Tests of `moepack.planning.machine`."""
