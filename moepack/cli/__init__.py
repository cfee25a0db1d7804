"""The command line: it parses options, calls the library, prints, and gives exit codes.

It knows nothing of the domain. A module for each group of commands.
"""
