"""How facts are written: as text for people, as JSON for programs, as pictures.

It measures nothing, and it prints nothing: it gives strings and files.
"""
