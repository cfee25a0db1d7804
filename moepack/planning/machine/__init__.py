"""The computer: its memory, GPUs and drive, and the basis of each figure.

Measures what can be measured, reads the rest from drivers and the kernel, and keeps it in a file
that people complete. The worth of a machine for a model is for others to say.
"""
