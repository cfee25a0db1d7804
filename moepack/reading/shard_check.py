"""Whether the shards that an index lies over are still those that were indexed.

A shard that was replaced would be read as if nothing had happened, since its slices mostly have no
digests. Its header has one, and another model or another quantisation has another header.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from moepack import digest
from moepack.errors import MachineError, PackError
from moepack.format.dense import ShardBytes
from moepack.format.index import Index
from moepack.storage.regular_file import NotRegularError, open_regular

MAX_HEADER_LENGTH = 256 << 20
"""Ten times what the largest vocabulary takes; what is longer is not read."""

_HINT = "it was replaced or is not complete: restore it, or run `moepack index` again"


def check_shards(index: Index, paths: Sequence[Path]) -> None:
    """Check the length and the header of each shard that the index lies over.

    Raises PackError where one is missing or is not what was indexed, MachineError where the system
    cannot read it.
    """
    shards = [number for number, file in enumerate(index.files) if file.is_shard]
    for number in shards:
        _check(paths[number], index.files[number].length)
    if shards:
        for held in index.shard_bytes():
            file = index.files[held.file]
            is_header = file.is_shard and not held.shard_offset
            if is_header and held.length <= MAX_HEADER_LENGTH:
                _check(paths[held.file], file.length, held)


def _check(path: Path, length: int, header: ShardBytes | None = None) -> None:
    """Check the length of a shard, and its header if that is given."""
    try:
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            found = os.fstat(file.fileno()).st_size
            if found != length:
                problem, expected = "the shard is not as long as it was", f"{length:,} bytes"
                raise PackError(
                    problem, path=path, expected=expected, found=f"{found:,}", hint=_HINT
                )
            if header is None:
                return
            data = os.pread(file.fileno(), header.length, header.offset)
    except FileNotFoundError:
        hint = "it was moved: link to it again, or run `moepack index` again"
        raise PackError("the shard is missing", path=path, hint=hint) from None
    except NotRegularError as error:
        raise PackError("not a regular file", path=path, found=error.kind, hint=_HINT) from None
    except OSError as error:
        raise MachineError(f"cannot read: {error.strerror}", path=path) from None
    if digest.of(data) != header.digest:
        raise PackError("the shard's header is not what it was", path=path, hint=_HINT)
