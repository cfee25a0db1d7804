"""The writing of a planned pack: data files and their records, index, manifest and commit.

At any moment there is either no pack or a whole one.
"""
