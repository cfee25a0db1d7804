"""A model by its path: a pack, or the shards of a GGUF as they lie."""

from moepack.common.paths import PathOrPaths
from moepack.pack.reading.directory import named_pack
from moepack.pack.reading.pack import Pack
from moepack.packing.shard_index import open_as_they_lie


def open_model(path: PathOrPaths) -> Pack:
    """Open a pack, or the shards of a GGUF as they lie. Raises the errors of both."""
    pack = named_pack(path)
    return open_as_they_lie(path) if pack is None else Pack(pack)
