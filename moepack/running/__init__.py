"""Programs of llama.cpp with streamed experts, their recordings, and a cache for engines."""
