"""Facts: looked up in sources and packs, and written as text for people, JSON, or pictures.

It measures nothing and prints nothing: it returns facts and strings, and draws into files.
"""
