"""Benchmarks: moepack against its peers and limits, on this machine, as ratios of one run."""
