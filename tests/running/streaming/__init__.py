"""Tests of `moepack.running.streaming`."""
