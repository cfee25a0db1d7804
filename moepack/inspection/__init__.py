"""The facts and lists of a model or a pack, without a measurement."""
