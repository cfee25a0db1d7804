"""Tests of `moepack.running.recording`."""
