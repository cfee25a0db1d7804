"""The indexes of packs in stores, kept on this machine: they are fetched whole, once.

A file is named by the digest of its index, and has that digest, or it is fetched anew.
"""

import contextlib
from pathlib import Path

from moepack.common import digest
from moepack.common.errors import MoepackError
from moepack.common.paths import RemotePath
from moepack.pack.format import records
from moepack.pack.format.manifest import IndexEntry
from moepack.storage.atomic import write_whole
from moepack.storage.folders import is_ours, user_folder
from moepack.storage.regular_file import read_back
from moepack.storage.remote.stores import store_of


def fetch_index(path: RemotePath, entry: IndexEntry) -> bytes:
    """Return the index at `path` that a manifest describes; from the cache if it is there.

    What comes from the store is returned as it is, right or wrong. Raises OSError.
    """
    cached = _cached(entry)
    if cached is not None:
        with contextlib.suppress(OSError):
            if is_ours(cached):
                data = read_back(cached, entry.length)
                if _is_right(data, entry):
                    return data
    data = store_of(path).read(path.key, entry.length)
    if cached is not None and _is_right(data, entry):
        with contextlib.suppress(OSError, MoepackError):
            write_whole(cached, data)
    return data


def _cached(entry: IndexEntry) -> Path | None:
    folder = user_folder("XDG_CACHE_HOME", ".cache")
    return None if folder is None else folder / f"index-{entry.digest:016x}.bin"


def _is_right(data: bytes, entry: IndexEntry) -> bool:
    end = entry.length - records.TRAILER.size
    has_digest = data[end:] == records.TRAILER.pack(entry.digest)
    return has_digest and digest.xxh3(memoryview(data)[:end]) == entry.digest
