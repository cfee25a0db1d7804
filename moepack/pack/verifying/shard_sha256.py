"""The SHA-256 of shards: of files, and of the shards that a whole pack is restored to."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from moepack.common.errors import PackError, SourceError, read_failure
from moepack.common.phases import Phases
from moepack.pack.reading.shard_map import ShardMap, map_shards
from moepack.pack.verifying.checked_pack import CheckedPack
from moepack.pack.verifying.report import Findings
from moepack.storage.extents import Extent
from moepack.storage.input_file import InputFile, open_input
from moepack.storage.thread_pool import run_each

_PIECE_LENGTH = 1 << 20


def sha256_of(path: str, length: int | None = None) -> str:
    """Return the SHA-256 of the first `length` bytes of a file, of all for None.

    Raises SourceError and MachineError.
    """
    sha256 = hashlib.sha256()
    try:
        with closing(open_input(path)) as file:
            for piece in file.stream(0, file.stamp.length if length is None else length):
                sha256.update(piece)
    except OSError as error:
        raise read_failure(error, path, SourceError) from None
    return sha256.hexdigest()


def sha256_of_restored(
    paths: Sequence[Path],
    shards: Sequence[ShardMap],
    threads: int,
    progress: Callable[[int, int], None],
) -> list[str]:
    """Return the SHA-256 of each shard, put together from the files `paths` of a sound pack.

    `progress` is called as for `verify`. Raises OSError, and EOFError for a file that ends early.
    """
    total = sum(piece.length for shard in shards for piece in shard.pieces)

    def compute(shard: ShardMap, advanced: Callable[[int], None]) -> str:
        sha256 = hashlib.sha256()
        files: dict[int, InputFile] = {}
        position = 0
        with ExitStack() as stack:
            for piece in shard.pieces:
                if piece.input not in files:
                    files[piece.input] = open_input(paths[piece.input])
                    stack.callback(files[piece.input].close)
                _add_zeros(sha256, piece.offset - position)
                position = piece.end
                for data in _content(files[piece.input], piece):
                    sha256.update(data)
                    advanced(len(data))
        _add_zeros(sha256, shard.length - position)
        return sha256.hexdigest()

    return run_each(compute, shards, threads, lambda length: progress(length, total))


def check_restored(pack: CheckedPack, threads: int, phases: Phases) -> int | None:
    """Compare the shards that a sound, whole pack is restored to with the SHA-256 in its manifest.

    Returns how many are equal, None if none was compared.
    """
    expected = {entry.name: entry.sha256 for entry in pack.manifest.source.shards if entry.sha256}
    if not pack.manifest.is_whole or not expected:
        return None
    shards = [shard for shard in map_shards(pack) if shard.name in expected]
    try:
        computed = sha256_of_restored(pack.paths, shards, threads, phases.begin())
    except OSError as error:
        raise read_failure(error, pack.path, PackError) from None
    except EOFError as error:
        pack.findings.add("file", f"cannot read: {error}")
        return None
    names = [shard.name for shard in shards]
    return count_equal(names, [expected[name] for name in names], computed, pack.findings)


def count_equal(
    names: Sequence[str], expected: Sequence[str], computed: Sequence[str], findings: Findings
) -> int:
    """Return how many SHA-256 are as expected by the manifest; each other one is a finding."""
    count = 0
    for name, manifests, ours in zip(names, expected, computed, strict=True):
        if ours == manifests:
            count += 1
        else:
            message = f"its SHA-256 is {ours}, the manifest says {manifests}"
            findings.add("source", message, file=name)
    return count


def _content(file: InputFile, piece: Extent) -> Iterator[bytes]:
    for start in range(0, piece.length, _PIECE_LENGTH):
        offset = piece.input_offset + start
        length = min(_PIECE_LENGTH, piece.length - start)
        data = b"".join(file.stream(offset, length))
        if len(data) < length:
            raise EOFError(f"ends at byte {offset + len(data):,}")
        yield data


def _add_zeros(sha256: "hashlib._Hash", length: int) -> None:
    for start in range(0, length, _PIECE_LENGTH):
        sha256.update(bytes(min(_PIECE_LENGTH, length - start)))
