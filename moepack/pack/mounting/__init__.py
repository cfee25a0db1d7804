"""Mount a whole pack: FUSE serves the shards of its source as read-only files."""
