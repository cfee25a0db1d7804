"""The work of a distributed pack, shared out: by parts of a job array, or by an executor."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from contextlib import contextmanager
from functools import lru_cache

from moepack.common.errors import MachineError, RequestError
from moepack.common.paths import AnyPath
from moepack.common.phases import Progress, advancing
from moepack.common.remote_path import is_remote
from moepack.packing.distributed_pack import DistributedPack, check_target
from moepack.packing.distributed_target import open_target
from moepack.packing.pack_request import PackRequest
from moepack.packing.pack_summary import WrittenFiles
from moepack.packing.plan import Plan
from moepack.packing.planned_pack import PlannedPack
from moepack.packing.source_identity import describe_shards, describe_source
from moepack.storage.atomic import require_folder_of
from moepack.storage.space import check_space

_PART = re.compile(r"\s*([0-9]{1,6})\s*/\s*([0-9]{1,6})\s*\Z", re.ASCII)


class Part:
    """Part `number` of `count`, counted from 1. Raises RequestError for anything else."""

    def __init__(self, part: str | tuple[int, int]) -> None:
        match = _PART.match(part) if isinstance(part, str) else None
        numbers = (int(match[1]), int(match[2])) if match else part
        if isinstance(numbers, str) or not 1 <= numbers[0] <= numbers[1]:
            raise RequestError(
                "not a part", argument="part", expected="3/16, from 1/16 to 16/16", found=repr(part)
            )
        self.number, self.count = numbers

    def share(self, lengths: Mapping[str, int]) -> list[str]:
        """Return the names that this part has of some files, so that all parts have like lengths.

        Each file belongs to one part alone, whoever computes it.
        """
        loads = [0] * self.count
        names = []
        for name in sorted(lengths, key=lambda name: (-lengths[name], name)):
            number = loads.index(min(loads))
            loads[number] += lengths[name]
            if number == self.number - 1:
                names.append(name)
        return sorted(names)


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
        self._part = None if part is None else Part(part)
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
        if not self._only_commits:
            pack.begin(join=self._joins)
            lengths = {name: file.length for name, file in planned.files.items()}
            missing = pack.missing()
            names = missing
            if self._part is not None:
                names = [name for name in self._part.share(lengths) if name in missing]
            finished_count = len(lengths) - len(missing)
            advanced = advancing(progress, sum(lengths[name] for name in names))
            if self._executor is not None:
                written = self._submit(self._executor, names, threads, advanced)
            elif names:
                written = pack.write(names, threads, advanced)
        if self._part is None:
            pack.commit(threads if strong else None, threads)
            return WrittenFiles(written, finished_count)
        return WrittenFiles(written, finished_count, len(pack.missing()))

    def _submit(
        self, executor: Executor, names: list[str], threads: int, advanced: Callable[[int], None]
    ) -> int:
        """Submit data files to an executor, one in each task; return the bytes written."""
        request = pickle.dumps(self._request)
        futures: list[Future[int]] = []
        written = 0
        with _translated(self._path):
            try:
                for name in names:
                    futures.append(
                        executor.submit(write_data_file, request, self._path, name, threads)
                    )
                for future in as_completed(futures):
                    written += future.result()
                    advanced(future.result())
            finally:
                for future in futures:
                    future.cancel()
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
    model = chosen.plan()
    described = describe_source(model.source, model.shape, describe_shards(model.source))
    pack = DistributedPack(PlannedPack(model.source, described, model.plan), open_target(path))
    pack.begin(join=True)
    return pack


@contextmanager
def _translated(path: AnyPath) -> Iterator[None]:
    """Turn the end of an executor's workers into MachineError."""
    try:
        yield
    except BrokenExecutor as error:
        hint = "continue with `resume=True`: finished files are skipped"
        raise MachineError(f"a worker died: {error}", path=path, hint=hint) from error
