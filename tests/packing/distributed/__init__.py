"""Tests of `moepack.packing.distributed`."""
