"""Tests of placements."""
