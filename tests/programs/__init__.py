"""Tests of programs of llama.cpp: how they are started, the server, and its clients."""
