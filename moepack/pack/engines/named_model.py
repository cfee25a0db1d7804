"""A model by its path: an open pack, or a source."""

from collections.abc import Iterator
from contextlib import contextmanager

from moepack.common.paths import PathOrPaths
from moepack.pack.reading.directory import named_pack
from moepack.pack.reading.pack import Pack
from moepack.source.shards import Source, open_source


@contextmanager
def named_model(paths: PathOrPaths) -> Iterator[Pack | Source]:
    """Open a pack by its directory, or a source as `open_source` does. Raises the errors of both.

    The pack is closed at the end of the block.
    """
    path = named_pack(paths)
    if path is None:
        yield open_source(paths)
    else:
        with Pack(path) as pack:
            yield pack
