"""A computer as figures: its memory, processors, GPUs and drive, and the basis of each figure.

They are kept in a file that people complete. Measuring and reading them is for the bench, and the
worth of a machine for a model for others.
"""
