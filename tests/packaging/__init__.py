"""Tests of the files in `packaging/`."""
