"""Pack: carry a plan out, so that at any moment there is either no pack or a whole one.

The order of events is the promise:

1. the journal is created in the target directory, and locked; the directory is synced;
2. each data file is written and synced, then the directory, and only then it is entered in the
   journal, which is synced too;
3. source and data files are looked at once more: what changed meanwhile is not committed;
4. the index is written and synced, then the manifest under a temporary name, then the directory;
5. the manifest is renamed to its name: this is the commit; the directory is synced;
6. the journal is removed.

A crash before 5 leaves a directory without a manifest, which no reader opens, and a journal from
which `resume` continues. A crash after 5 leaves a whole pack, at worst with a journal beside it.

A file that an interrupted pack finished is trusted by its name, kind and length, which the journal
stands for; from then on it is watched as the new ones are. `verify` proves the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moepack.errors import MachineError, MoepackError, RequestError, SourceError, write_failure
from moepack.format import manifest
from moepack.format.names import JOURNAL_NAME
from moepack.format.source_entry import SourceEntry
from moepack.packing import index_encoder
from moepack.packing.journal import Journal, open_journal
from moepack.packing.plan import Plan
from moepack.packing.target_directory import WatchedFiles, prepare
from moepack.source.shards import Source
from moepack.storage.atomic import sync_directory, write_synced
from moepack.storage.copying import Copier, WrittenFile
from moepack.storage.extents import NewFile
from moepack.storage.inputs import InputFile, Inputs
from moepack.storage.regular_file import remove
from moepack.storage.space import check_space
from moepack.version import __version__

Progress = Callable[[int, int], None]
"""Called with the bytes done since its last call, and the bytes that are to be done in all."""

TOOL = f"moepack {__version__}"
DEFAULT_THREADS = 4
_TEMPORARY_NAME = f"{manifest.NAME}.tmp"


class PackResult(NamedTuple):
    """What `pack` did: bytes of data files written now, and files taken over from before."""

    path: Path
    written_length: int
    resumed_file_count: int


def pack(
    source: Source,
    described: SourceEntry,
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    resume: bool = False,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> PackResult:
    """Write the pack that `plan` describes into the directory `target`.

    `described` is the source as the manifest will state it. `progress` is called from one thread at
    a time. Raises RequestError for an existing target, SourceError for a source that fails or
    changes, MachineError for a machine that cannot (no space, a failing device), and leaves then
    what `resume` can continue from.
    """
    path = Path(target)
    with _translated(path):
        created = prepare(path, resume)
        journal = _open_journal(path, created)
        unfinished = _UnfinishedPack(source, described, plan, path, journal, created)
        try:
            unfinished.begin(resume)
            result = unfinished.write_files(threads, progress)
            unfinished.commit()
        except BaseException as error:
            unfinished.abandon(error)
            raise
        finally:
            unfinished.journal.close()
    return result


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn what the system says while writing into a MachineError."""
    try:
        yield
    except OSError as error:
        hint = next(iter(getattr(error, "__notes__", ())), None)  # from `abandon`
        raise write_failure(error, path, hint) from error
    except MemoryError as error:
        hint = "use fewer --threads, and continue with --resume"
        raise MachineError("not enough memory", path=path, hint=hint) from error


class _UnsettledError(MachineError):
    """The pack was committed; something after that failed."""


class _UnfinishedPack:
    """One pack in the making."""

    def __init__(
        self,
        source: Source,
        described: SourceEntry,
        plan: Plan,
        path: Path,
        journal: Journal,
        created: bool,
    ) -> None:
        self.source = source
        self.described = described
        self.plan = plan
        self.path = path
        self.journal = journal
        self.created = created
        self.begun = False
        self.watched = WatchedFiles(path)
        self.files = {file.name: file for file in plan.new_files()}

    def begin(self, resume: bool) -> None:
        """Take up the journal, and check that there is space for what is left to do."""
        if (self.path / manifest.NAME).exists():  # committed by another packer just now
            raise RequestError("a whole pack is here already", path=self.path)
        identity = self._identity()
        if resume:
            self.journal.resume(identity)
            self._take_over_finished()
            self._remove_unfinished()
        files = (file.length for file in self._missing_files())
        check_space(self.path, sum(files) + self.plan.index_length)
        if not resume:
            self.journal.begin(identity)
        sync_directory(self.path)
        self.begun = True

    def _identity(self) -> dict[str, Any]:
        """Return what has to be the same for files of an interrupted pack to be taken over."""
        plan = self.plan
        return {
            "tool": TOOL,
            "source": [
                [shard.header_sha256, *header.stamp]
                for shard, header in zip(self.described.shards, self.source.shards, strict=True)
            ],
            "dense": plan.dense is not None,
            "layout": plan.layout.to_json(),
            "hotness": plan.hotness_to_json(),
            "layers": None if plan.layers is None else list(plan.layers),
        }

    def _take_over_finished(self) -> None:
        """Watch the files that the journal knows; redo those that are not as it says."""
        for finished in list(self.journal.finished.values()):
            file = self.files.get(finished.name)
            if (
                file is None
                or len(finished.digests) != sum(1 for _ in file.extents())
                or not self.watched.add(file.name, file.length)
            ):
                self.journal.forget(finished.name)

    def _remove_unfinished(self) -> None:
        """Remove what a killed packer left half written: it only takes space."""
        leftovers = [*self.files, manifest.INDEX_NAME, _TEMPORARY_NAME]
        for name in leftovers:
            if name not in self.journal.finished:
                remove(self.path / name)

    def _missing_files(self) -> list[NewFile]:
        return [file for file in self.files.values() if file.name not in self.journal.finished]

    def write_files(self, threads: int, progress: Progress | None) -> PackResult:
        """Write, sync and record each file that is not finished yet."""
        missing = self._missing_files()
        total = sum(file.length for file in missing)

        def advanced(length: int) -> None:
            if progress is not None:
                progress(length, total)

        shards = [InputFile(header.path, header.stamp) for header in self.source.shards]
        with Inputs(shards, SourceError) as inputs:
            Copier(self.path, inputs, advanced).write(missing, threads, self._record)
            inputs.check_unchanged()
        return PackResult(self.path, total, len(self.files) - len(missing))

    def _record(self, written: WrittenFile) -> None:
        """Enter a synced file in the journal, once its name is as safe as its bytes."""
        self.watched.add(written.name, self.files[written.name].length)
        sync_directory(self.path)
        self.journal.add(written)

    def _check_unchanged(self) -> None:
        """Raise MachineError where a finished file is not any more what was finished."""
        for finished in list(self.journal.finished.values()):
            if not self.watched.is_unchanged(self.files[finished.name], finished):
                self.journal.forget(finished.name)  # else `resume` would trust its length
                raise MachineError(
                    "the file was changed or removed after it was written",
                    path=self.path / finished.name,
                    hint="let nothing else write there, and run the same command with --resume",
                )

    def commit(self) -> None:
        """Write index and manifest; the rename of the manifest is the commit."""
        self._check_unchanged()
        digests = {name: file.digests for name, file in self.journal.finished.items()}
        index = index_encoder.encode(self.plan, digests)
        write_synced(self.path / manifest.INDEX_NAME, index)
        temporary = self.path / _TEMPORARY_NAME
        write_synced(temporary, encode_manifest(self.plan, self.described, index))
        sync_directory(self.path)
        temporary.rename(self.path / manifest.NAME)
        self._settle()

    def _settle(self) -> None:
        """Make the commit outlive a loss of power, and only then remove the journal."""
        try:
            problem = "may not outlive a loss of power"
            sync_directory(self.path)
            problem = "still has its journal"
            self.journal.remove()
        except OSError as error:
            problem = f"the pack is whole, but {problem}: {error.strerror}"
            hint = "find out what is wrong with the drive, then run `moepack verify`"
            raise _UnsettledError(problem, path=self.path, hint=hint) from error

    def abandon(self, error: BaseException) -> None:
        """Clean up after a failure: what is finished stays for `resume`, the rest goes.

        Where the work was refused before it began, an interrupted pack is left as it was.
        """
        if os.path.exists(self.path / manifest.NAME):
            # What could not be synced once may seem to be synced the next time, and is lost.
            if not isinstance(error, _UnsettledError):
                with contextlib.suppress(_UnsettledError):
                    self._settle()
            return
        with contextlib.suppress(OSError):
            if self.begun:
                self._remove_unfinished()
            if self.journal.is_new and not self.journal.finished:
                self.journal.remove()
                _remove_if_empty(self.path, self.created)
        hint = "run the same command with --resume to continue"
        if isinstance(error, MoepackError):
            error.hint = error.hint or hint
        else:
            error.add_note(hint)


def encode_manifest(plan: Plan, described: SourceEntry, index: bytes) -> bytes:
    """Return the bytes of the manifest of the pack that `plan` describes, with that index."""
    held = manifest.Manifest(
        tool=TOOL,
        is_whole=plan.is_whole,
        source=described,
        layout=plan.layout.to_json(),
        hotness=plan.hotness_to_json(),
        layers=None if plan.layers is None else list(plan.layers),
        index_entry=manifest.describe_index(index),
        files=tuple(manifest.FileEntry(file.name, file.length) for file in plan.new_files()),
    )
    return manifest.encode(held)


def _open_journal(path: Path, created: bool) -> Journal:
    try:
        return open_journal(path / JOURNAL_NAME)
    except BaseException:
        _remove_if_empty(path, created)
        raise


def _remove_if_empty(path: Path, created: bool) -> None:
    if created:
        with contextlib.suppress(OSError):
            path.rmdir()
