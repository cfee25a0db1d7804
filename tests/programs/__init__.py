"""Tests of llama.cpp's programs, the server and its clients."""
