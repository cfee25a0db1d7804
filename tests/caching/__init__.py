"""Tests of what caches keep and give up."""
