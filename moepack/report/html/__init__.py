"""A model as one page for a browser: facts of other calls, drawn, with their tables.

It gathers what `inspect`, `simulate`, `forecast` and others return, and computes none of it. A
module has the sections about one thing. The page is a single file: no network, no fonts, no clock.
"""
