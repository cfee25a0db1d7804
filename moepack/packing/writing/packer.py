"""Pack: carry a plan out, so that at any moment there is either no pack or a whole one.

The order of events is the promise:

1. the journal is created in the target directory, and locked; the directory is synced;
2. each data file is written and synced, then the directory, and only then it is entered in the
   journal, which is synced too;
3. source and data files are looked at once more: if one has changed meanwhile, nothing is
   committed;
4. index and manifest are written, synced and read back, the manifest under a temporary name, then
   the directory is synced;
5. the manifest is renamed to its name: this is the commit; the directory is synced;
6. the journal is removed.

A crash before 5 leaves a directory without a manifest, which no reader opens, and a journal from
which `resume` continues. A crash after 5 leaves a whole pack, at worst with a journal beside it.

A file that an interrupted pack finished is read again, and kept if it has the digests that the
journal states, and zeros between its parts; from then on it is watched as the new ones are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.common.digest_counts import DigestCounts
from moepack.common.errors import (
    MachineError,
    MoepackError,
    RequestError,
    write_failure,
)
from moepack.common.pack_files import JOURNAL_NAME
from moepack.common.phases import Phases, Progress, advancing
from moepack.pack.format import manifest
from moepack.packing.plan.pack_summary import WrittenFiles
from moepack.packing.writing.commit import TEMPORARY_NAME, UnsettledError, commit, settling
from moepack.packing.writing.journal import Journal
from moepack.packing.writing.planned_pack import PlannedPack
from moepack.packing.writing.target_directory import WatchedFiles, prepare
from moepack.storage.atomic import sync_directory
from moepack.storage.extents import FinishedFile, NewFile, is_whole
from moepack.storage.folders import check_space
from moepack.storage.regular_file import remove
from moepack.storage.thread_pool import run_each

DEFAULT_THREADS = 4


def pack(
    planned: PlannedPack,
    target: str | os.PathLike[str],
    *,
    resume: bool = False,
    strong: bool = False,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> WrittenFiles:
    """Write a planned pack into the directory `target`.

    With `strong` all written bytes are read once more, and have a SHA-256 in the index, and the
    index has one in the manifest. With `resume` files that were finished before are read and
    compared with their digests; a damaged one is written anew. `progress` is called from one thread
    at a time.

    Raises RequestError for an existing target, SourceError for a source that fails or changes,
    MachineError for a machine that cannot (no space, a failing device); `resume` can then go on.
    """
    path = Path(target)
    with _translated(path):
        created = prepare(path, resume)
        try:
            journal = Journal(path / JOURNAL_NAME)
        except BaseException:
            _remove_if_empty(path, created)
            raise
        unfinished = _UnfinishedPack(planned, path, journal, created)
        try:
            phases = Phases(progress)
            unfinished.begin(resume, threads, phases)
            counts = unfinished.write_files(threads, phases.begin())
            unfinished.commit(threads if strong else None)
        except BaseException as error:
            unfinished.abandon(error)
            raise
        finally:
            journal.close()
    return counts


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn OSError and MemoryError into MachineError."""
    try:
        yield
    except OSError as error:
        hint = next(iter(getattr(error, "__notes__", ())), None)  # from `abandon`
        raise write_failure(error, path, hint) from error
    except MemoryError as error:
        hint = "use fewer `threads`, and continue with `resume=True`"
        raise MachineError("not enough memory", path=path, hint=hint) from error


@dataclass
class _UnfinishedPack:
    """One pack in the making."""

    planned: PlannedPack
    path: Path
    journal: Journal
    created: bool
    begun: bool = False

    def __post_init__(self) -> None:
        self.watched = WatchedFiles(self.path)
        self.files = self.planned.files
        self.kept_length = 0
        self.damaged: list[str] = []

    def begin(self, resume: bool, threads: int, phases: Phases) -> None:
        """Take up the journal, and check that there is space for all missing files."""
        if (self.path / manifest.NAME).exists():  # committed by another packer just now
            raise RequestError("a whole pack is here already", path=self.path)
        identity = self._identity()
        if resume:
            self.journal.resume(identity)
            self._take_over_finished(threads, phases)
            self._remove_unfinished()
        missing_length = sum(file.length for file in self._missing_files())
        check_space(self.path, missing_length + self.planned.index_length)
        if not resume:
            self.journal.begin(identity)
        sync_directory(self.path)
        self.begun = True

    def _identity(self) -> dict[str, Any]:
        """Return the identity of the input; on one machine a shard's stamp is a part of it."""
        shards = zip(self.planned.described.shards, self.planned.source.shards, strict=True)
        source = [[entry.header_sha256, *header.stamp] for entry, header in shards]
        return self.planned.identity() | {"source": source}

    def _take_over_finished(self, threads: int, phases: Phases) -> None:
        """Watch and read the files that the journal lists; forget any that differ from it."""
        there = []
        for finished in list(self.journal.finished.values()):
            file = self.planned.on_disk(finished)
            if file is None:
                self.journal.forget(finished.name)
            elif self.watched.add(file.name, file.length):
                there.append(file)
            else:
                self.damaged.append(file.name)

        def is_right(file: NewFile, advanced: Callable[[int], None]) -> bool:
            with contextlib.suppress(OSError):  # a bad sector: it is written anew, elsewhere
                return is_whole(self.path / file.name, file, advanced)
            return False

        length = sum(file.length for file in there)
        left = sum(file.length for name, file in self.files.items()) - length
        advanced = advancing(phases.begin(later=left), length)
        for file, right in zip(there, run_each(is_right, there, threads, advanced), strict=True):
            if right:
                self.kept_length += sum(extent.length for extent in file.extents())
            else:
                self.damaged.append(file.name)
        for name in self.damaged:
            self.journal.forget(name)

    def _remove_unfinished(self) -> None:
        """Remove the half-written files of a killed packer: they only take space."""
        for name in (*self.files, self.planned.index_name, TEMPORARY_NAME):
            if name not in self.journal.finished:
                remove(self.path / name)

    def _missing_files(self) -> list[NewFile]:
        return [file for file in self.files.values() if file.name not in self.journal.finished]

    def write_files(self, threads: int, progress: Progress) -> WrittenFiles:
        """Write, sync and record each file that is not finished yet."""
        missing = {file.name: file for file in self._missing_files()}
        advanced = advancing(progress, sum(file.length for file in missing.values()))
        with self.planned.inputs() as inputs:
            self.planned.write(missing, self.path, inputs, threads, advanced, self._record)
            inputs.check_unchanged()
            if len(missing) < len(self.files):
                self.planned.check_shard_hashes(inputs, self.path, threads)
        written = sum(f.length for name, f in self._finished().items() if name in missing)
        digests = DigestCounts(known_length=self.kept_length, compared_length=self.kept_length)
        return WrittenFiles(
            written,
            len(self.files) - len(missing),
            digests=digests,
            damaged_files=tuple(self.damaged),
        )

    def _finished(self) -> dict[str, NewFile]:
        """Return the finished files, as they lie on the disk."""
        return {name: self._on_disk(one) for name, one in self.journal.finished.items()}

    def _on_disk(self, finished: FinishedFile) -> NewFile:
        file = self.planned.on_disk(finished)
        assert file is not None
        return file

    def _record(self, finished: FinishedFile) -> None:
        """Enter a synced file in the journal, once its name is as safe as its bytes."""
        self.watched.add(finished.name, self._on_disk(finished).length)
        sync_directory(self.path)
        self.journal.add(finished)

    def commit(self, strong_threads: int | None) -> None:
        """Commit the pack; `strong_threads` compute strong digests before, None for no digests.

        Raises MachineError if a finished file was changed meanwhile.
        """
        for name, file in self._finished().items():
            if not self.watched.is_unchanged(file):
                self.journal.forget(name)
                raise MachineError(
                    "the file was changed or removed after it was written",
                    path=self.path / name,
                    hint="let nothing else write there, and run the same again with `resume=True`",
                )
        paths = [self.path / name for name in self.files]
        index, data = self.planned.encode(self.journal.finished, paths, strong_threads)
        commit(self.path, self.planned.index_name, index, data)
        self._remove_journal()

    def _remove_journal(self) -> None:
        with settling(self.path, "still has its journal"):
            self.journal.remove()

    def abandon(self, error: BaseException) -> None:
        """Clean up after a failure: finished files stay for `resume`, the rest goes.

        If the work was refused before it began, an interrupted pack is left as it was.
        """
        if os.path.exists(self.path / manifest.NAME):
            # Bytes that could not be synced once may seem to be synced the next time, and be lost.
            if not isinstance(error, UnsettledError):
                with contextlib.suppress(UnsettledError):
                    with settling(self.path, "may not outlive a loss of power"):
                        sync_directory(self.path)
                    self._remove_journal()
            return
        with contextlib.suppress(OSError):
            if self.begun:
                self._remove_unfinished()
            if self.journal.is_new and not self.journal.finished:
                self.journal.remove()
                _remove_if_empty(self.path, self.created)
        hint = "run the same again with `resume=True` to continue"
        if isinstance(error, MachineError) and error.hint and "resume=True" not in error.hint:
            error.hint = f"{error.hint}; then {hint}"
        elif isinstance(error, MoepackError):
            error.hint = error.hint or hint
        else:
            error.add_note(hint)


def _remove_if_empty(path: Path, created: bool) -> None:
    if created:
        with contextlib.suppress(OSError):
            path.rmdir()
