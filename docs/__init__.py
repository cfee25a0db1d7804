"""The documents, and what writes the parts of them that come from the command line."""
