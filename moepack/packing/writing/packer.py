"""Pack: carry a plan out, whole or a share of it.

How it is written so that at any moment there is either no pack or a whole one, `unfinished_pack`
says.
"""

from __future__ import annotations

from collections.abc import Iterable

from moepack.common.phases import DigestCounts, Phases, Progress, advancing
from moepack.common.share import Share
from moepack.packing.plan.pack_summary import WrittenFiles
from moepack.packing.writing.planned_pack import PlannedPack
from moepack.packing.writing.target import Target
from moepack.packing.writing.unfinished_pack import UnfinishedPack, opened

DEFAULT_THREADS = 4


def pack(
    planned: PlannedPack,
    target: Target,
    *,
    resume: bool,
    strong: bool,
    threads: int,
    progress: Progress | None,
) -> WrittenFiles:
    """Write a planned pack at a target.

    With `strong` all written bytes are read once more, and have a SHA-256 in the index, and the
    index has one in the manifest. With `resume` files that were finished before are compared with
    their digests; a damaged one is written anew. `progress` is called from one thread at a time.

    Raises RequestError for an existing target, SourceError for a source that fails or changes,
    MachineError for a machine that cannot (no space, a failing device); `resume` can then go on.
    """
    with opened(planned, target) as unfinished:
        unfinished.begin(resume=resume)
        files = _finish(unfinished, planned, planned.files, threads, progress)
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
        files = _finish(unfinished, planned, names, threads, progress)
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
    written = unfinished.write(own, threads, advanced)
    return WrittenFiles(written, len(finished), None, digests, tuple(damaged))
