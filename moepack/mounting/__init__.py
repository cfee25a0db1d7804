"""Show the shards of a whole pack as read-only files, which FUSE serves and nobody stores.

It knows how bytes of a shard come together from a pack, and when a mount begins and ends; where
they lie is the reading side's knowledge. It compares no digests: `verify` does.
"""
