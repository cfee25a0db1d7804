"""Tests of the examples for authors of engines."""
