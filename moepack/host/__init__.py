"""This computer: the memory and the processors that this process may use, and its GPUs.

Reads them from the kernel and from drivers, as plain numbers. Measuring is for the bench, and the
worth of a machine for a model for planning.
"""
