"""Tests of `moepack.running.pager`."""
