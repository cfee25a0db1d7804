"""Tests of running a pack under llama.cpp."""
