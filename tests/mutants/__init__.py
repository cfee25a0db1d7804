"""Mutants: small changes of the code that must never be wrong, each to be noticed by a test."""
