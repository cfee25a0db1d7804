"""The check that the shards under an index are still the indexed ones.

A shard that was replaced would be read as if nothing had happened, since its slices mostly have no
digests. Its header has one, and another model or another quantisation has another header.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moepack.common import digest
from moepack.common.errors import MachineError, PackError
from moepack.pack.format.index import Index
from moepack.pack.format.records import ShardBytesRecord
from moepack.storage.regular_file import NotRegularError, open_regular, read_whole

MAX_HEADER_LENGTH = 256 << 20
"""Ten times the header of the largest vocabulary; a longer one is not read."""

_HINT = "it was replaced or is not complete: restore it, or run `moepack index` again"


def check_shards(index: Index, paths: Sequence[Path]) -> None:
    """Check the length and the header of each shard that the index lies over.

    Raises PackError if one is missing or another file, MachineError if the system cannot read it.
    """
    shards = [number for number, file in enumerate(index.files) if file.is_shard]
    for number in shards:
        _check(paths[number], index.files[number].length)
    if shards:
        for extent in index.shard_bytes():
            file = index.files[extent.file]
            is_header = file.is_shard and not extent.shard_offset
            if is_header and extent.length <= MAX_HEADER_LENGTH:
                _check(paths[extent.file], file.length, extent)


def _check(path: Path, length: int, header: ShardBytesRecord | None = None) -> None:
    """Check the length of a shard, and its header if that is given."""
    try:
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            length_now = os.fstat(file.fileno()).st_size
            if length_now != length:
                raise PackError(
                    "the shard is not as long as it was",
                    path=path,
                    expected=f"{length:,} bytes",
                    found=f"{length_now:,}",
                    hint=_HINT,
                )
            if header is None:
                return
            data = read_whole(file.fileno(), header.offset, header.length)
    except FileNotFoundError:
        hint = "it was moved: link to it again, or run `moepack index` again"
        raise PackError("the shard is missing", path=path, hint=hint) from None
    except NotRegularError as error:
        raise PackError("not a regular file", path=path, found=error.kind, hint=_HINT) from None
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=path) from None
    except EOFError as error:
        raise PackError("the shard became shorter", path=path, found=str(error)) from None
    if digest.xxh3(data) != header.digest:
        raise PackError("the shard's header is not what it was", path=path, hint=_HINT)
