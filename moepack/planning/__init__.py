"""Planning: the memory a model takes, its speed on a machine, and its placement there."""
