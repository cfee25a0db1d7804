"""A planned pack on one machine: data files, index, manifest, journal and commit.

At any moment there is either no pack or a whole one.
"""
