"""The plan of a pack: layouts, the hotness of its blobs, its files, and their summary.

It writes nothing, and knows neither journals nor targets.
"""
