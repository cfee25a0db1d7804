"""A pack that several write: whoever comes finishes what is left, and anyone commits.

    model.moepack/
      experts-….bin, dense.bin     each appears whole
      pack.records/
        input.json                 the identity of the input: all writers must have the same
        experts-00000.bin.json     the record of a finished file: its name, its digests, its input,
                                   its ETag in a store

The order of events is the promise: a data file is written and synced elsewhere, appears under its
name, and only then gets its record. Once all files have one, and are as they were written, index
and manifest are written; the manifest, created only if there is none, is the commit. The same input
gives the same bytes, so that two writers of one file, or two that commit, do no harm. Records are
removed last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from typing import Any

from moepack.common import digest, strict_json
from moepack.common.errors import ErrorCode, MachineError, RequestError, remedy, write_failure
from moepack.common.pack_files import RECORDS_NAME
from moepack.common.paths import is_remote
from moepack.common.phases import Progress, advancing
from moepack.pack.format import manifest, records
from moepack.packing.distributed.target import Target
from moepack.packing.writing.finished_files import from_json, to_json
from moepack.packing.writing.journal import check_identity
from moepack.packing.writing.planned_pack import PlannedPack
from moepack.storage.extents import FinishedFile, NewFile
from moepack.storage.folders import check_space
from moepack.storage.inputs import Inputs
from moepack.storage.thread_pool import ThreadPool, run_each

_INPUT = f"{RECORDS_NAME}/input.json"
_MAX_LENGTH = 64 << 20
"""Of a record: a file of a million parts has 16 MiB of digests, as text twice that."""


class DistributedPack:
    """A planned pack in the making at `target`. Raises MoepackError by whose fault it is.

    `compared_length` is the bytes of finished files that were read last, and had their digests.
    """

    def __init__(self, planned: PlannedPack, target: Target) -> None:
        self._planned = planned
        self._target = target
        self._input = digest.to_text(digest.xxh3(_seal(planned.identity())))
        self._marks: dict[str, str | None] = {}
        self._intact: set[str] = set()
        self.compared_length = 0

    def begin(self, *, join: bool) -> None:
        """Begin the pack at the target, or join those who write it.

        Without `join`, raises RequestError if a pack of the same input was begun there.
        """
        with self._translated():
            names = self._target.lengths()
            check_target(self._target, names, join=join)
            self._target.make()
            identity = self._planned.identity()
            if _INPUT in names or not self._target.create(_INPUT, _seal(identity)):
                data = self._target.read(_INPUT, _MAX_LENGTH)
                begun_with = None if data is None else _unseal(data)
                if begun_with is not None:
                    check_identity(begun_with, identity, self._target.path)
                else:  # it was damaged: each record says which input it is of
                    self._target.put(_INPUT, _seal(identity))

    def missing(self) -> list[str]:
        """Return the names of the data files that are not finished."""
        with self._translated():
            finished = self._finished()
        return [name for name in self._planned.files if name not in finished]

    def find_damaged(
        self, names: Collection[str], threads: int, progress: Progress | None
    ) -> list[str]:
        """Return those of `names` whose files were finished and are damaged; they are missing then.

        In a folder files are read, in a store their ETags are compared. Files that this run has
        written, or found intact, are passed over.
        """
        with self._translated():
            finished = self._finished()
            left = (one for name, one in finished.items() if name in names)
            files = [self._on_disk(one) for one in left if one.name not in self._intact]

            def is_intact(file: NewFile, advanced: Callable[[int], None]) -> bool:
                return self._target.is_intact(file, self._marks.get(file.name), advanced)

            advanced = advancing(progress, sum(file.length for file in files))
            are_intact = run_each(is_intact, files, threads, advanced)
            self._intact.update(file.name for file in compress(files, are_intact))
            damaged = [file.name for file in files if file.name not in self._intact]
            if not is_remote(self._target.path):
                self.compared_length = sum(f.length for f in files if f.name in self._intact)
            for name in damaged:
                self._target.remove(_record_name(name))
        return damaged

    def written_elsewhere(self, names: Iterable[str]) -> None:
        """Take files for intact that workers of this run have written."""
        self._intact.update(names)

    def write(self, names: Iterable[str], threads: int, advanced: Callable[[int], None]) -> int:
        """Write data files, one after the other, but those that are finished; return their bytes.

        `advanced` is called with the bytes done since its last call. While one file is moved or
        uploaded, the next is written.
        """
        written = 0
        with (
            self._translated(),
            self._planned.inputs() as inputs,
            self._target.scratch() as folder,
            ThreadPool(max_workers=1) as uploads,
        ):
            pending = uploads.submit(lambda: None)
            for name in names:
                if self._finished_file(name, self._target.lengths()) is not None:
                    advanced(self._planned.files[name].length)
                    continue
                check_space(folder, self._planned.files[name].length)
                finished: list[FinishedFile] = []
                self._planned.write([name], folder, inputs, threads, advanced, finished.append)
                inputs.check_unchanged()
                pending.result()
                (file,) = finished
                written += self._on_disk(file).length
                pending = uploads.submit(self._take, folder / name, file)
            pending.result()
        return written

    def commit(self, strong: int | None, threads: int) -> None:
        """Make it a pack. Raises RequestError if a data file is not finished.

        `strong` threads compute strong digests, None for none of them.
        """
        with self._translated():
            finished = self._finished()
            missing = [name for name in self._planned.files if name not in finished]
            if self._is_committed():
                self._target.clean_up()
                return
            if missing := missing or self.find_damaged(self._planned.files, threads, None):
                count = f"{len(missing):,} of {len(self._planned.files):,} data files"
                state = "damaged " if missing[0] in finished else "missing "
                raise RequestError(
                    f"{count} are not finished",
                    path=self._target.path,
                    found=state + ", ".join(missing[:3]) + ", …" * (len(missing) > 3),
                    hint="write all parts first; names may take a minute to appear on NFS",
                )
            try:
                with self._planned.inputs() as inputs:
                    self._publish(finished, strong, inputs, threads)
            except OSError:
                if not self._is_committed():  # else somebody did, and removed our files with theirs
                    raise
            self._target.clean_up()

    def _publish(
        self,
        finished: Mapping[str, FinishedFile],
        strong: int | None,
        inputs: Inputs,
        threads: int,
    ) -> None:
        path = self._target.path
        self._planned.check_shard_hashes(inputs, path, threads)
        paths = [path / name for name in self._planned.files]
        index, described = self._planned.encode(finished, paths, strong)
        self._target.put(manifest.INDEX_NAME, index)
        if self._target.read(manifest.INDEX_NAME, records.MAX_INDEX_LENGTH) != index:
            problem = "other bytes came back than were written"
            hint = "the drive, the memory or the store is failing: nothing was committed"
            raise MachineError(problem, path=path / manifest.INDEX_NAME, hint=hint)
        if self._target.create(manifest.NAME, described):
            return
        if self._target.read(manifest.NAME, manifest.MAX_LENGTH) != described:
            problem = "a pack of other input was committed here meanwhile"
            raise RequestError(problem, path=path, hint="choose another place")

    def _is_committed(self) -> bool:
        return self._target.read(manifest.NAME, manifest.MAX_LENGTH) is not None

    def _take(self, path: Any, file: FinishedFile) -> None:
        mark = self._target.take(path, file.name)
        self._intact.add(file.name)
        record = to_json(file) | {"input": self._input, "mark": mark}
        self._target.put(_record_name(file.name), _seal(record))

    def _finished(self) -> dict[str, FinishedFile]:
        """Return the finished files by name."""
        lengths = self._target.lengths()
        files = (self._finished_file(name, lengths) for name in self._planned.files)
        return {file.name: file for file in files if file is not None}

    def _finished_file(self, name: str, lengths: Mapping[str, int]) -> FinishedFile | None:
        """Return a file with a sound record, if it has its length; None for any other."""
        if _record_name(name) not in lengths:
            return None
        data = self._target.read(_record_name(name), _MAX_LENGTH)
        entry = None if data is None else _unseal(data)
        if entry is None or entry.get("input") != self._input:
            return None
        try:
            file = from_json(entry)
        except (KeyError, TypeError, ValueError):
            return None
        self._marks[name] = entry.get("mark")
        on_disk = self._planned.on_disk(file)
        is_there = on_disk is not None and lengths.get(name) == on_disk.length
        return file if is_there and file.name == name else None

    def _on_disk(self, file: FinishedFile) -> NewFile:
        on_disk = self._planned.on_disk(file)
        assert on_disk is not None
        return on_disk

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn OSError into MachineError, with the way to go on."""
        try:
            yield
        except OSError as error:
            hint = "run the same again (`resume=True`, but for parts): finished files are skipped"
            if (cause := remedy(error)) is not None:
                hint = f"{cause}; then {hint}"
            raise write_failure(error, self._target.path, hint) from error


def check_target(target: Target, names: Mapping[str, int], *, join: bool) -> None:
    """Raise RequestError if other files than those of an unfinished pack are in the way."""
    path = target.path
    others = sorted(name for name in names if not name.startswith(f"{RECORDS_NAME}/"))
    if manifest.NAME in others:
        hint = "choose another place, or remove it"
        code = ErrorCode.PACK_EXISTS
        raise RequestError("a whole pack is here already", path=path, hint=hint, code=code)
    if _INPUT in names and not join:
        problem = "an interrupted pack is here, or one that is being written"
        hint = "continue it with `resume=True`, or remove the folder"
        raise RequestError(problem, path=path, hint=hint)
    if others and _INPUT not in names:
        raise RequestError(
            "not empty, and not an unfinished pack of several writers",
            path=path,
            found=", ".join(others[:3]),
            hint="choose a new or an empty folder",
        )


def _record_name(name: str) -> str:
    return f"{RECORDS_NAME}/{name}.json"


def _seal(entry: Mapping[str, Any]) -> bytes:
    return manifest.seal(dict(entry))


def _unseal(data: bytes) -> dict[str, Any] | None:
    """Return the values of a sealed record; None if it is not as it was written."""
    try:
        entry: dict[str, Any] = strict_json.parse(data)
        del entry["manifest_digest"]
        return entry if _seal(entry) == data else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
