"""Plans and watches the programs that run a model with streamed experts.

The cache of experts is in the program itself: the library of `native/`, which is loaded into it,
reads, maps and evicts them. Here a table tells it of the model and how to cache, a control file of
the memory; from that file statistics, errors and selections are read. Nothing in a program waits
for this. How a program is started is not known here.
"""
