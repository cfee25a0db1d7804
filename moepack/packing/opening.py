"""A model by its path: a pack, or the shards of a GGUF as they lie."""

from moepack.packing.shard_index import open_as_they_lie
from moepack.paths import PathOrPaths
from moepack.reading.directory import named_pack
from moepack.reading.pack import Pack


def open_model(path: PathOrPaths) -> Pack:
    """Open a pack, or the shards of a GGUF as they lie. Raises what either does."""
    pack = named_pack(path)
    return open_as_they_lie(path) if pack is None else Pack(pack)
