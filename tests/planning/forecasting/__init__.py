"""Tests of `moepack.planning.forecasting`."""
