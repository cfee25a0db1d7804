"""Tests of `moepack.report.html`."""
