"""Pack: carry a plan out, in one process or in several.

How it is written so that at any moment there is either no pack or a whole one, `unfinished_pack`
says.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import lru_cache, partial

from moepack.common.paths import is_remote
from moepack.common.phases import DigestCounts, Phases, Progress, advancing
from moepack.common.tasks import Share, run_tasks
from moepack.packing.plan.pack_request import PackRequest
from moepack.packing.plan.pack_summary import WrittenFiles
from moepack.packing.writing.planned_pack import PlannedPack
from moepack.packing.writing.target import Target, open_target
from moepack.packing.writing.unfinished_pack import UnfinishedPack, going_on, opened

DEFAULT_THREADS = 4

Write = Callable[[list[str], int, Callable[[int], None]], int]


def pack(
    planned: PlannedPack,
    target: Target,
    *,
    resume: bool = False,
    strong: bool = False,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
    workers: tuple[Executor, PackRequest] | None = None,
) -> WrittenFiles:
    """Write a planned pack at a target, by the workers of an executor if there are any.

    With `strong` all written bytes are read once more, and have a SHA-256 in the index, and the
    index has one in the manifest. With `resume` files that were finished before are compared with
    their digests; a damaged one is written anew. `progress` is called from one thread at a time.

    Raises RequestError for an existing target, SourceError for a source that fails or changes,
    MachineError for a machine that cannot (no space, a failing device); `resume` can then go on.
    """
    with opened(planned, target) as unfinished:
        unfinished.begin(resume=resume)
        write = unfinished.write
        if workers is not None:
            write = partial(_submit, unfinished, planned, target, workers)
        files = _finish(unfinished, planned, planned.files, write, threads, progress)
        unfinished.commit(threads, strong=strong)
    return files


def write_part(
    planned: PlannedPack,
    target: Target,
    part: str | tuple[int, int],
    *,
    threads: int,
    progress: Progress | None,
) -> WrittenFiles:
    """Write a share of the data files."""
    lengths = {name: file.length for name, file in planned.files.items()}
    names = Share(part).names(lengths)
    with opened(planned, target) as unfinished:
        unfinished.begin(resume=True)
        files = _finish(unfinished, planned, names, unfinished.write, threads, progress)
        return files._replace(missing_file_count=len(unfinished.missing()))


def commit(
    planned: PlannedPack,
    target: Target,
    *,
    strong: bool,
    threads: int,
    progress: Progress | None,
) -> WrittenFiles:
    """Make a pack of data files that are all written."""
    with opened(planned, target) as unfinished:
        unfinished.commit(threads, strong=strong, progress=progress)
    return WrittenFiles(0, 0)


def _finish(
    unfinished: UnfinishedPack,
    planned: PlannedPack,
    names: Iterable[str],
    write: Write,
    threads: int,
    progress: Progress | None,
) -> WrittenFiles:
    """Write those of the data files `names` that are not finished, or are damaged."""
    phases = Phases(progress)
    names, lengths = list(names), {name: file.length for name, file in planned.files.items()}
    later = sum(lengths[name] for name in unfinished.missing(names))
    damaged = unfinished.find_damaged(names, threads, phases.begin(later=later))
    missing = unfinished.missing()
    own = [name for name in names if name in missing]
    finished = [name for name in lengths if name not in missing]
    digests = DigestCounts(unfinished.payload(finished), compared_length=unfinished.compared_length)
    advanced = advancing(phases.begin(), sum(lengths[name] for name in own))
    written = write(own, threads, advanced)
    return WrittenFiles(written, len(finished), None, digests, tuple(damaged))


def _submit(
    unfinished: UnfinishedPack,
    planned: PlannedPack,
    target: Target,
    workers: tuple[Executor, PackRequest],
    names: list[str],
    threads: int,
    advanced: Callable[[int], None],
) -> int:
    """Write data files by workers, one in each task; return their bytes."""
    executor, request = workers
    pickled = pickle.dumps(request.elsewhere(planned.source, planned.plan))
    path = os.fspath(target.path) if is_remote(target.path) else os.path.abspath(target.path)
    tasks = [(pickled, path, name, threads) for name in names]
    written = 0
    for length in run_tasks(executor, write_data_file, tasks):
        written += length
        advanced(length)
    unfinished.written_elsewhere(names)
    return written


def write_data_file(request: bytes, path: str, name: str, threads: int) -> int:
    """Write one data file of the pack at `path`, unless it is finished; return its bytes.

    `request` is a pickled PackRequest: this worker plans the pack itself, and joins it only if its
    input is the same.
    """
    unfinished, target = _joined(request, path)
    with going_on(target):
        return unfinished.write([name], threads, lambda _: None)


@lru_cache(maxsize=1)
def _joined(request: bytes, path: str) -> tuple[UnfinishedPack, Target]:
    """Plan a pack and join it; once in a process, for all of its tasks."""
    chosen: PackRequest = pickle.loads(request)
    target = open_target(path, is_alone=False)
    unfinished = UnfinishedPack(PlannedPack.describe(chosen.plan()), target)
    with going_on(target):
        unfinished.begin(resume=True)
    return unfinished, target
