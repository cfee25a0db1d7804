"""Programs of llama.cpp with streamed experts, and recordings of their routers."""
