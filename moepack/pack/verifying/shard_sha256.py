"""The SHA-256 of shards: of files, and of the shards that a whole pack is restored to."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from moepack.common.errors import PackError, SourceError, read_failure
from moepack.common.phases import Phases
from moepack.pack.reading.shard_map import ShardMap, map_shards
from moepack.pack.verifying.checked_pack import CheckedPack
from moepack.pack.verifying.report import Findings
from moepack.storage.copying import read_extent
from moepack.storage.extents import Extent
from moepack.storage.input_file import open_input
from moepack.storage.inputs import Inputs
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

    `progress` is called as for `verify`. Raises PackError for a file that ends early, MachineError.
    """
    total = sum(piece.length for shard in shards for piece in shard.pieces)
    with Inputs(paths, PackError) as inputs:

        def compute(shard: ShardMap, advanced: Callable[[int], None]) -> str:
            return hash_extents(inputs, shard.length, shard.pieces, advanced)

        return run_each(compute, shards, threads, lambda length: progress(length, total))


def hash_extents(
    inputs: Inputs,
    length: int,
    extents: Iterable[Extent],
    advanced: Callable[[int], None],
    slices: list[bytes] | None = None,
) -> str:
    """Return the SHA-256 of `length` bytes: extents of `inputs`, with zeros between them.

    The digest of each extent is appended to `slices`. Raises as `inputs`.
    """
    whole, position = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_PIECE_LENGTH))
    for extent in extents:
        _add_zeros(whole, extent.offset - position)
        own = hashlib.sha256()
        for piece in read_extent(inputs, extent, lambda left: buffer[:left]):
            whole.update(piece)
            if slices is not None:
                own.update(piece)
            advanced(len(piece))
        if slices is not None:
            slices.append(own.digest())
        position = extent.end
    _add_zeros(whole, length - position)
    return whole.hexdigest()


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
    except PackError as error:
        pack.findings.add_error("file", error)
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


def _add_zeros(sha256: "hashlib._Hash", length: int) -> None:
    for start in range(0, length, _PIECE_LENGTH):
        sha256.update(bytes(min(_PIECE_LENGTH, length - start)))
