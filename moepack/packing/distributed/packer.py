"""The work of a distributed pack, shared out: by parts of a job array, or by an executor."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import Executor
from functools import lru_cache

from moepack.common.digest_counts import DigestCounts
from moepack.common.paths import AnyPath, is_remote
from moepack.common.phases import Phases, Progress, advancing
from moepack.common.tasks import Share, run_tasks
from moepack.packing.distributed.target import open_target
from moepack.packing.distributed.unfinished_pack import DistributedPack, check_target
from moepack.packing.plan.pack_request import PackRequest
from moepack.packing.plan.pack_summary import WrittenFiles
from moepack.packing.plan.plan import Plan
from moepack.packing.writing.planned_pack import PlannedPack
from moepack.storage.atomic import require_folder_of
from moepack.storage.folders import check_space


class DistributedPacker:
    """Writes a pack together with others, or into a store, as `pack_model` says.

    `request` is one that can be planned anywhere.
    """

    def __init__(
        self,
        request: PackRequest,
        path: AnyPath,
        part: str | tuple[int, int] | None,
        commit: bool,
        executor: Executor | None,
        resume: bool,
    ) -> None:
        self._request = request
        self._path = os.fspath(path) if is_remote(path) else os.path.abspath(path)
        self._share = None if part is None else Share(part)
        self._only_commits = commit
        self._executor = executor
        self._joins = resume or commit or part is not None

    def check(self, plan: Plan) -> None:
        """Raise the error with which writing the pack of `plan` would end before it wrote."""
        target = open_target(self._path)
        lengths = target.lengths()
        check_target(target, lengths, join=self._joins)
        if not is_remote(self._path):
            require_folder_of(self._path)
            length = plan.data_length + plan.index_length - sum(lengths.values())
            check_space(target.path, length)

    def write(
        self,
        planned: PlannedPack,
        *,
        strong: bool,
        threads: int,
        progress: Progress | None,
    ) -> WrittenFiles:
        """Write the share of this call; commit if that is all."""
        pack = DistributedPack(planned, open_target(self._path))
        written = finished_count = 0
        damaged: list[str] = []
        digests = DigestCounts()
        if not self._only_commits:
            pack.begin(join=self._joins)
            lengths = {name: file.length for name, file in planned.files.items()}
            own = list(lengths) if self._share is None else list(self._share.names(lengths))
            phases = Phases(progress)
            later = sum(lengths[name] for name in pack.missing() if name in own)
            damaged = pack.find_damaged(own, threads, phases.begin(later=later))
            missing = pack.missing()
            names = [name for name in own if name in missing]
            finished_count = len(lengths) - len(missing)
            finished_length = sum(lengths.values()) - sum(lengths[name] for name in missing)
            digests = DigestCounts(finished_length, compared_length=pack.compared_length)
            advanced = advancing(phases.begin(), sum(lengths[name] for name in names))
            if self._executor is not None:
                written = self._submit(self._executor, names, threads, advanced)
                pack.written_elsewhere(names)
            elif names:
                written = pack.write(names, threads, advanced)
        if self._share is None:
            pack.commit(threads if strong else None, threads)
            return WrittenFiles(written, finished_count, None, digests, tuple(damaged))
        missing_count = len(pack.missing())
        return WrittenFiles(written, finished_count, missing_count, digests, tuple(damaged))

    def _submit(
        self, executor: Executor, names: list[str], threads: int, advanced: Callable[[int], None]
    ) -> int:
        """Submit data files to an executor, one in each task; return the bytes written."""
        request = pickle.dumps(self._request)
        written = 0
        tasks = [(request, self._path, name, threads) for name in names]
        for length in run_tasks(executor, write_data_file, tasks):
            written += length
            advanced(length)
        return written


def write_data_file(request: bytes, path: str, name: str, threads: int) -> int:
    """Write one data file of the pack at `path`, unless it is finished; return its bytes.

    `request` is a pickled PackRequest: this worker plans the pack itself, and joins it only if its
    input is the same.
    """
    return _joined(request, path).write([name], threads, lambda _: None)


@lru_cache(maxsize=1)
def _joined(request: bytes, path: str) -> DistributedPack:
    """Plan a pack and join it; once in a process, for all of its tasks."""
    chosen: PackRequest = pickle.loads(request)
    pack = DistributedPack(PlannedPack.describe(chosen.plan()), open_target(path))
    pack.begin(join=True)
    return pack
