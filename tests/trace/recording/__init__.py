"""Tests of `moepack.trace.recording`."""
