"""Models that run: the chat and the answers of `run`, and programs with the experts of a model."""
