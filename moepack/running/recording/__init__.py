"""Record a trace: run a model under llama.cpp and watch its routers."""
