"""Tests of `moepack.running.programs`."""
