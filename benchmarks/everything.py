"""All that is measured, in its order."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import (
    as_it_comes,
    copies,
    elsewhere,
    header,
    models,
    opening,
    reading,
    routed,
    running,
    tracing,
    two_drives,
)
from benchmarks.table import Row
from moepack.host.memory_limits import available_memory
from moepack.storage.folders import free_space

SHARED_MEMORY = Path("/dev/shm")
FRESH_ROUNDS = 15
TRACE_LENGTH = 100_000_000


def rows(folder: Path, layers: int, rounds: int, trace: Path | None) -> Iterator[Row]:
    """Measure one thing after another, with files in `folder`, and yield what was found.

    A model repeats the routing of `trace`, or one that is made up.
    """
    yield from opening.starting(FRESH_ROUNDS)
    yield from opening.sources(folder, FRESH_ROUNDS)
    yield from opening.packs(folder, FRESH_ROUNDS)
    yield from header.digests(folder, FRESH_ROUNDS)
    yield from tracing.working_set(folder, TRACE_LENGTH, rounds)
    yield from tracing.formats(folder, TRACE_LENGTH // 2, rounds)
    shards = models.write_model(folder, layers)
    hotness = models.write_hotness(folder / "hotness.csv", layers)
    yield from copies.packing("disk", shards, hotness, folder, rounds)
    yield from copies.verifying(shards, folder, 2 * rounds)
    yield from copies.giving_back("disk", shards, folder, rounds)
    yield from reading.first_expert(folder / "many", FRESH_ROUNDS)
    yield from reading.packs_against_shards(folder / "layers", shards, 2 * rounds)
    yield from as_it_comes.from_the_drive(folder, rounds)
    yield from as_it_comes.from_memory(folder, rounds)
    yield from reading.against_fio(shards[0], rounds)
    for name in ("copy", *copies.LAYOUTS):
        shutil.rmtree(folder / name)
    yield from elsewhere.rows(folder, shards, rounds)
    yield from _on_tmpfs(shards, hotness, rounds)
    yield from two_drives.mirrored(folder, rounds)
    yield from running.model(folder, 2)
    yield from routed.models(folder, 2, trace)


def _on_tmpfs(shards: list[Path], hotness: Path, rounds: int) -> Iterator[Row]:
    length = sum(shard.stat().st_size for shard in shards)
    # It is memory, and limited beside that.
    if min(available_memory(), free_space(SHARED_MEMORY)) < 5 * length:
        yield Row("pack, tmpfs", "no room")
        return
    with tempfile.TemporaryDirectory(prefix="moepack-bench-", dir=SHARED_MEMORY) as name:
        folder = Path(name)
        moved = [Path(shutil.move(shard, folder / shard.name)) for shard in shards]
        yield from copies.packing("tmpfs", moved, hotness, folder, rounds)
        yield from copies.giving_back("tmpfs", moved, folder, rounds)
        for leftover in ("copy", *copies.LAYOUTS):
            shutil.rmtree(folder / leftover)
        yield from elsewhere.workers(folder, moved, rounds)
