"""Every format that routing is written in, and the one registry that tells them apart.

A new format is an entry in `registry`, and a reader in the module of its kind. `reading` turns
files of all of them into moepack's own.
"""
