"""Programs whose experts a pager brings: the same text, whatever happens."""
