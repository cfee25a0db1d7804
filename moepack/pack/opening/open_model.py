"""A model by its path: a pack, or the shards of a GGUF as they lie."""

from collections.abc import Iterator
from contextlib import contextmanager

from moepack.common.paths import PathOrPaths, path_list
from moepack.pack.opening.shards import open_shards
from moepack.pack.reading.directory import named_pack
from moepack.pack.reading.pack import Pack
from moepack.source.shards import Source, open_source

Model = PathOrPaths | Pack
"""A model that is open, or the path of a pack or of a source, as for `open_model`."""


def open_model(path: PathOrPaths) -> Pack:
    """Open a pack by its directory, or the shards of a GGUF as `open_source` finds them.

    Nothing is written: the index over shards is made in memory. Raises the errors of both.
    """
    pack = named_pack(path)
    return open_shards(path) if pack is None else Pack(pack)


def is_pack(model: Model) -> bool:
    """Return whether a model is a pack, and not the shards of a GGUF."""
    return model.source is None if isinstance(model, Pack) else named_pack(model) is not None


def path_of(model: Model) -> str:
    """Return the path that messages and commands name a model by."""
    return str(model.path if isinstance(model, Pack) else path_list(model)[0])


@contextmanager
def pack_or_source(model: Model) -> Iterator[Pack | Source]:
    """Open a pack, or read the headers of a source alone: it may be elsewhere. Raises their errors.

    A pack is closed at the end of the block, unless it was open before.
    """
    if isinstance(model, Pack):
        yield model.source or model
        return
    path = named_pack(model)
    if path is None:
        yield open_source(model)
    else:
        with Pack(path) as pack:
            yield pack
