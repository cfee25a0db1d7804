"""A pack in the making: data files, and a record of each that is finished.

    model.moepack/
      experts-….bin, dense.bin     each appears whole
      pack.journal                 empty: the lock of the one process that writes, if it is one
      pack.records/
        input.json                 the identity of the input: all writers must have the same
        experts-00000.bin.json     the record of a finished file: its name, its digests, its input,
                                   its ETag in a store
        writing/                   files that are not finished

The order of events is the promise:

1. a data file is written and synced elsewhere, appears under its name, and only then gets its
   record, which appears whole as well;
2. once all files have one, and are as they were written, index and manifest are written, synced and
   read back;
3. the manifest appears by a rename, or where several write only if there is none: the commit;
4. the records are removed, the lock last.

A crash before 3 leaves a directory without a manifest, which no reader opens, and the records of
what is finished. Whoever goes on reads finished files again, and keeps those with the digests of
their records, and zeros between their parts; from then on they are watched as new ones are. A
record that is damaged, or of other input, costs no more than its file. The same input gives the
same bytes, so that two writers of one file, or two that commit, do no harm.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import compress

from moepack.common import digest
from moepack.common.errors import (
    MachineError,
    MoepackError,
    RequestError,
    remedy,
    write_failure,
)
from moepack.common.pack_files import JOURNAL_NAME, RECORDS_NAME
from moepack.common.paths import is_remote
from moepack.common.phases import Progress, advancing
from moepack.pack.format import manifest, records
from moepack.packing.writing.commit import TEMPORARY_NAME, UnsettledError, commit, settling
from moepack.packing.writing.planned_pack import PlannedPack
from moepack.packing.writing.records import MAX_LENGTH, seal, unseal
from moepack.packing.writing.target import INPUT_NAME, OwnFolder, Target, check_existing
from moepack.storage.atomic import sync_directory
from moepack.storage.extents import FinishedFile, NewFile
from moepack.storage.folders import check_space
from moepack.storage.input_file import Stamp
from moepack.storage.thread_pool import ThreadPool, run_each


class UnfinishedPack:
    """A planned pack in the making at `target`; used inside `opened`.

    `compared_length` is the bytes of finished files that were read last, and had their digests.
    """

    def __init__(self, planned: PlannedPack, target: Target) -> None:
        self._planned = planned
        self._target = target
        self._identity = planned.identity(has_stamps=target.is_alone)
        self._input = digest.to_text(digest.xxh3(seal(self._identity)))
        self._marks: dict[str, str | None] = {}
        self._watched: dict[str, Stamp] = {}
        self._is_begun = self._has_taken_over = False
        self.compared_length = 0

    def begin(self, *, resume: bool) -> None:
        """Begin the pack at the target, or join those who write it.

        Without `resume`, raises RequestError if a pack of the same input was begun there.
        """
        target = self._target
        check_existing(target, resume=resume)
        target.make()
        if manifest.NAME in target.names():  # committed by another just now
            raise RequestError("a whole pack is here already", path=target.path)
        data = target.read(INPUT_NAME, MAX_LENGTH)
        if data is None:
            self._is_begun = True
            if target.create(INPUT_NAME, seal(self._identity)):
                return
            data = target.read(INPUT_NAME, MAX_LENGTH)
        begun_with = unseal(data or b"")
        changed = begun_with and [
            key for key in self._identity if begun_with.get(key) != self._identity[key]
        ]
        if changed:
            problem = "the interrupted pack was made from other input: not the same "
            hint = "remove the directory and pack again, or restore the input"
            raise RequestError(problem + ", ".join(changed), path=target.path, hint=hint)
        self._is_begun = True
        if begun_with is None:  # it was damaged: each record says which input it is of
            target.put(INPUT_NAME, seal(self._identity))

    def missing(self, names: Collection[str] | None = None) -> list[str]:
        """Return those of `names`, by default of all data files, that are not finished."""
        names = self._planned.files if names is None else names
        stamps = self._target.stamps()
        return self._missing(names, self._recorded(names, stamps), stamps)

    def find_damaged(
        self, names: Iterable[str], threads: int, progress: Progress | None
    ) -> list[str]:
        """Return those of `names` whose files were finished and are damaged; they are missing then.

        In a folder files are read, in a store their ETags are compared. Files that this run has
        written, or found intact, are passed over while their stamps are the same.
        """
        stamps = self._target.stamps()
        recorded = self._recorded(names, stamps)
        damaged = [name for name in recorded if not self._is_there(name, stamps)]
        files = [
            self._on_disk(one)
            for name, one in recorded.items()
            if name not in damaged and self._watched.get(name) != stamps[name]
        ]

        def is_intact(file: NewFile, advanced: Callable[[int], None]) -> bool:
            return self._target.is_intact(file, self._marks.get(file.name), advanced)

        advanced = advancing(progress, sum(file.length for file in files))
        are_intact = run_each(is_intact, files, threads, advanced)
        intact = [file.name for file in compress(files, are_intact)]
        self._has_taken_over = self._has_taken_over or bool(intact)
        self._watched.update((name, stamps[name]) for name in intact)
        self.compared_length = 0 if is_remote(self._target.path) else self.payload(intact)
        damaged += [file.name for file in files if file.name not in intact]
        for name in damaged:
            if name in stamps:  # else another machine may not see it yet
                self._target.remove(_record_name(name))
        return damaged

    def payload(self, names: Iterable[str]) -> int:
        """Return the bytes of the source in data files."""
        files = map(self._planned.files.__getitem__, names)
        return sum(extent.length for file in files for extent in file.extents())

    def write(self, names: Collection[str], threads: int, advanced: Callable[[int], None]) -> int:
        """Write data files, but those that others have finished meanwhile; return their bytes.

        `advanced` is called with the bytes done since its last call. Where several write, each file
        appears as soon as it can: while one is moved or uploaded, the next is written.
        """
        target, is_alone = self._target, self._target.is_alone
        if is_alone:
            self._remove_unfinished()
        written = 0
        with self._planned.inputs() as inputs, ThreadPool(max_workers=1) as uploads:
            pending = uploads.submit(lambda: None)
            for batch in [list(names)] if is_alone else [[name] for name in names]:
                length = sum(self._planned.files[name].length for name in batch)
                if not is_alone and not self.missing(batch):
                    advanced(length)
                    continue
                for name in batch:  # of an earlier task of this worker, which failed
                    (target.scratch / name).unlink(missing_ok=True)
                check_space(target.scratch, length + self._planned.plan.index_length)
                finished: list[FinishedFile] = []
                done = self._take if is_alone else finished.append
                self._planned.write(batch, target.scratch, inputs, threads, advanced, done)
                inputs.check_unchanged()
                pending.result()
                written += length
                for file in finished:
                    pending = uploads.submit(self._take, file)
            pending.result()
        return written

    def commit(self, threads: int, *, strong: bool, progress: Progress | None = None) -> None:
        """Make it a pack. Raises RequestError if a data file is not finished.

        With `strong` it has strong digests. Raises MachineError if a file was changed since this
        run has written it, or found it intact.
        """
        target, stamps = self._target, self._target.stamps()
        recorded = self._recorded(self._planned.files, stamps)
        missing = self._missing(self._planned.files, recorded, stamps)
        is_damaged = not missing
        missing = missing or self.find_damaged(self._planned.files, threads, progress)
        if not target.is_alone and self._is_committed():  # then its records are on their way out
            target.clean_up()
            return
        if changed := next((name for name in missing if name in self._watched), None):
            raise MachineError(
                "the file was changed or removed after it was written",
                path=target.path / changed,
                hint="let nothing else write there, and run the same again with `resume=True`",
            )
        if missing:
            count = f"{len(missing):,} of {len(self._planned.files):,} data files"
            raise RequestError(
                f"{count} are not finished",
                path=target.path,
                found=("damaged " if is_damaged else "missing ")
                + ", ".join(missing[:3])
                + ", …" * (len(missing) > 3),
                hint="write all parts first; names may take a minute to appear on NFS",
            )
        if self._has_taken_over or not target.is_alone:
            self._planned.check_shard_hashes(target.path, threads)
        paths = [target.path / name for name in self._planned.files]
        index, described = self._planned.encode(recorded, paths, threads if strong else 0)
        if isinstance(target, OwnFolder):
            commit(target.path, manifest.INDEX_NAME, index, described)
            self._clean_up()
            return
        try:
            self._publish(index, described)
        except OSError:
            if not self._is_committed():  # else somebody did, and removed our files with theirs
                raise
        target.clean_up()

    def _publish(self, index: bytes, described: bytes) -> None:
        target = self._target
        target.put(manifest.INDEX_NAME, index)
        if target.read(manifest.INDEX_NAME, records.MAX_INDEX_LENGTH) != index:
            problem = "other bytes came back than were written"
            hint = "the drive, the memory or the store is failing: nothing was committed"
            raise MachineError(problem, path=target.path / manifest.INDEX_NAME, hint=hint)
        if target.create(manifest.NAME, described):
            return
        if target.read(manifest.NAME, manifest.MAX_LENGTH) != described:
            problem = "a pack of other input was committed here meanwhile"
            raise RequestError(problem, path=target.path, hint="choose another place")

    def _is_committed(self) -> bool:
        return self._target.read(manifest.NAME, manifest.MAX_LENGTH) is not None

    def _clean_up(self) -> None:
        with settling(self._target.path, "still has its journal"):
            self._target.clean_up()

    def abandon(self, error: BaseException) -> None:
        """Clean up after a failure: finished files stay, for `resume`, the rest goes."""
        target = self._target
        if not (isinstance(target, OwnFolder) and target.is_locked):
            return
        if isinstance(error, UnsettledError):
            return
        if manifest.NAME in target.names():
            # Bytes that could not be synced once may seem to be synced the next time, and be lost.
            with settling(target.path, "may not outlive a loss of power"):
                sync_directory(target.path)
            self._clean_up()
            return
        if self._is_begun:
            self._remove_unfinished()
        elif INPUT_NAME in target.stamps():  # of another input
            return
        if target.names() <= {JOURNAL_NAME, RECORDS_NAME}:
            target.abandon()

    def _remove_unfinished(self) -> None:
        """Remove damaged files and leftovers of a crash: they only take space."""
        stamps = self._target.stamps()
        unfinished = (name for name in self._planned.files if _record_name(name) not in stamps)
        for name in (*unfinished, manifest.INDEX_NAME, TEMPORARY_NAME):
            self._target.remove(name)

    def _take(self, file: FinishedFile) -> None:
        """Give a synced file its name, and then its record."""
        stamp, mark = self._target.take(file.name)
        self._watched[file.name] = stamp
        digests = file.digests.tobytes().hex()
        record = {"name": file.name, "digests": digests, "input": self._input, "mark": mark}
        self._target.put(_record_name(file.name), seal(record))

    def _recorded(
        self, names: Iterable[str], stamps: Mapping[str, Stamp]
    ) -> dict[str, FinishedFile]:
        """Return those of `names` that have a sound record, of this input."""
        there = (name for name in names if _record_name(name) in stamps)
        files = {name: self._read_record(name) for name in there}
        return {name: file for name, file in files.items() if file is not None}

    def _read_record(self, name: str) -> FinishedFile | None:
        data = self._target.read(_record_name(name), MAX_LENGTH)
        entry = None if data is None else unseal(data)
        if entry is None or entry.get("input") != self._input:
            return None
        try:
            file = FinishedFile(str(entry["name"]), array("Q", bytes.fromhex(entry["digests"])))
        except (KeyError, TypeError, ValueError):
            return None
        self._marks[name] = entry.get("mark")
        return file if file.name == name and self._planned.on_disk(file) is not None else None

    def _missing(
        self, names: Iterable[str], recorded: Collection[str], stamps: Mapping[str, Stamp]
    ) -> list[str]:
        return [n for n in names if n not in recorded or not self._is_there(n, stamps)]

    def _is_there(self, name: str, stamps: Mapping[str, Stamp]) -> bool:
        return name in stamps and stamps[name].length == self._planned.files[name].length

    def _on_disk(self, file: FinishedFile) -> NewFile:
        on_disk = self._planned.on_disk(file)
        assert on_disk is not None
        return on_disk


@contextlib.contextmanager
def opened(planned: PlannedPack, target: Target) -> Iterator[UnfinishedPack]:
    """Yield the pack in the making at `target`, for a block.

    If the block fails, what is not finished is removed, and the error says how to go on.
    """
    unfinished = UnfinishedPack(planned, target)
    with going_on(target):
        try:
            yield unfinished
        except BaseException as error:
            with contextlib.suppress(OSError, UnsettledError):
                unfinished.abandon(error)
            raise
        finally:
            target.close()


@contextlib.contextmanager
def going_on(target: Target) -> Iterator[None]:
    """Turn OSError and MemoryError into MachineError, and add to each error how to go on."""
    hint = "run the same again with `resume=True` to continue"
    if not target.is_alone:
        hint = "run the same again (`resume=True`, but for parts): finished files are skipped"
    try:
        yield
    except OSError as error:
        cause = remedy(error)
        hint = hint if cause is None else f"{cause}; then {hint}"
        raise write_failure(error, target.path, hint) from error
    except MemoryError as error:
        hint = f"use fewer `threads`; then {hint}"
        raise MachineError("not enough memory", path=target.path, hint=hint) from error
    except MoepackError as error:
        is_done = isinstance(error, UnsettledError)
        if isinstance(error, MachineError) and error.hint and "resume=True" not in error.hint:
            error.hint += "" if is_done else f"; then {hint}"
        error.hint = error.hint or hint
        raise
    except BaseException as error:
        error.add_note(hint)
        raise


def _record_name(name: str) -> str:
    return f"{RECORDS_NAME}/{name}.json"
