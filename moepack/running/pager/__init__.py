"""Maps experts into any llama.cpp program when its routers select them, from outside.

A library that is preloaded into the program announces selections and maps experts; everything
else is decided here: which are read, kept and evicted. How a program is started is not known here.
"""
