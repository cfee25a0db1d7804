"""Tests of `moepack.running.serving`."""
