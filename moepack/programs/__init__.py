"""Start a llama.cpp program, whichever it is, with a library loaded into it before its own.

It knows how that library is compiled and kept, which programs can be given one, with which words
and variables they are started, and how signals, the terminal and exit codes go through. What the
library and the pager say to each other it does not know.
"""
