"""Tests of `moepack.planning.placing`."""
