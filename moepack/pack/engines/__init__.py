"""Export packs to files of other engines: one module for each format."""
