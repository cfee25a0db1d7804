"""Tests of how any llama.cpp program is started."""
