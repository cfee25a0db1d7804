"""Checks of a machine that runs models, each with a verdict and a hint, and a prognosis."""
