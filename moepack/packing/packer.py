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
import hashlib
import os
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moepack.errors import MachineError, MoepackError, RequestError, SourceError, write_failure
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.names import JOURNAL_NAME
from moepack.format.source_entry import SourceEntry
from moepack.packing import index_encoder, strong_digests
from moepack.packing.finished_files import FinishedFile, makes_sense, on_disk
from moepack.packing.journal import Journal, open_journal
from moepack.packing.plan import DENSE_NAME, Plan
from moepack.packing.target_directory import WatchedFiles, prepare
from moepack.source.shards import Source
from moepack.storage.atomic import sync_directory, write_synced
from moepack.storage.copying import Copier
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
    strong: bool = False,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> PackResult:
    """Write the pack that `plan` describes into the directory `target`.

    With `strong` everything that was written is read once more, and has a SHA-256 in the index, and
    the index has one in the manifest. `described` is the source as the manifest will state it.
    `progress` is called from one thread at a time. Raises RequestError for an existing target,
    SourceError for a source that fails or changes, MachineError for a machine that cannot (no
    space, a failing device), and leaves then what `resume` can continue from.
    """
    path = Path(target)
    with _translated(path):
        created = prepare(path, resume)
        journal = _open_journal(path, created)
        unfinished = _UnfinishedPack(source, described, plan, path, journal, created)
        try:
            unfinished.begin(resume)
            result = unfinished.write_files(threads, progress)
            unfinished.commit(threads if strong else None)
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
        hint = "use fewer `threads`, and continue with `resume=True`"
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
            **self._codec_identity(),
        }

    def _codec_identity(self) -> dict[str, Any]:
        """Return what the frames depend on beside the layout, which names codec and level."""
        if self.plan.layout.codec is None:
            return {}
        from moepack.storage.frames import VERSION  # it loads the codec

        return {"version of the codec": VERSION}

    def _take_over_finished(self) -> None:
        """Watch the files that the journal knows; redo those that are not as it says."""
        for finished in list(self.journal.finished.values()):
            file = self.files.get(finished.name)
            if (
                file is None
                or not makes_sense(file, finished, self._is_compressed(file))
                or not self.watched.add(file.name, on_disk(self.plan, file, finished).length)
            ):
                self.journal.forget(finished.name)

    def _is_compressed(self, file: NewFile) -> bool:
        """Return whether a file is written with a codec: one of blobs is, if there is a codec."""
        return self.plan.layout.codec is not None and file.name != DENSE_NAME

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
        compressed = {file.name for file in missing if self._is_compressed(file)}
        with Inputs(shards, SourceError) as inputs:
            if compressed:
                self._compress(compressed, inputs, threads, advanced)
            copied = [file for file in missing if file.name not in compressed]
            Copier(self.path, inputs, advanced).write(
                copied, threads, lambda written: self._record(FinishedFile(*written))
            )
            inputs.check_unchanged()
        names = {file.name for file in missing}
        written = sum(f.length for name, f in self._finished().items() if name in names)
        return PackResult(self.path, written, len(self.files) - len(missing))

    def _compress(
        self, names: Container[str], inputs: Inputs, threads: int, advanced: Callable[[int], None]
    ) -> None:
        """Write the files of blobs that have these names."""
        from moepack.packing.compressed_files import CompressedFiles  # it loads the codec

        files = [file for file in self.plan.files if file.name in names]
        CompressedFiles(self.path, inputs, self.plan, advanced).write(files, threads, self._record)

    def _finished(self) -> dict[str, NewFile]:
        """Return the finished files, as they lie on the disk."""
        finished = self.journal.finished
        return {name: on_disk(self.plan, self.files[name], finished[name]) for name in finished}

    def _record(self, finished: FinishedFile) -> None:
        """Enter a synced file in the journal, once its name is as safe as its bytes."""
        file = on_disk(self.plan, self.files[finished.name], finished)
        self.watched.add(finished.name, file.length)
        sync_directory(self.path)
        self.journal.add(finished)

    def _check_unchanged(self) -> None:
        """Raise MachineError where a finished file is not any more what was finished."""
        for name, file in self._finished().items():
            if not self.watched.is_unchanged(file):
                self.journal.forget(name)  # else `resume` would trust its length
                raise MachineError(
                    "the file was changed or removed after it was written",
                    path=self.path / name,
                    hint="let nothing else write there, and run the same again with `resume=True`",
                )

    def commit(self, strong_threads: int | None) -> None:
        """Write index and manifest; the rename of the manifest is the commit.

        In so many threads strong digests are computed before; None for none.
        """
        self._check_unchanged()
        index = index_encoder.encode(self.plan, self.journal.finished)
        if strong_threads is not None:
            paths = [self.path / name for name in self.files]
            index = strong_digests.add(index, paths, strong_threads)
        write_synced(self.path / manifest.INDEX_NAME, index)
        temporary = self.path / _TEMPORARY_NAME
        write_synced(
            temporary, encode_manifest(self.plan, self.described, index, strong_threads is not None)
        )
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
        hint = "run the same again with `resume=True` to continue"
        if isinstance(error, MoepackError):
            error.hint = error.hint or hint
        else:
            error.add_note(hint)


def encode_manifest(
    plan: Plan, described: SourceEntry, index: bytes, strong: bool = False
) -> bytes:
    """Return the bytes of the manifest of the pack that `plan` describes, with that index.

    With `strong` it has the SHA-256 of the index.
    """
    entry = manifest.describe_index(index)
    if strong:
        entry = entry._replace(sha256=hashlib.sha256(index).hexdigest())
    decoded = Index(index, entry.name)
    # Where nothing was shortened, the pack is what it would be without a codec.
    layout = plan.layout if decoded.codecs else plan.layout.with_codec(None)
    held = manifest.Manifest(
        tool=TOOL,
        is_whole=plan.is_whole,
        source=described,
        layout=layout.to_json(),
        hotness=plan.hotness_to_json(),
        layers=None if plan.layers is None else list(plan.layers),
        index_entry=entry,
        files=tuple(manifest.FileEntry(file.name, file.length) for file in decoded.files),
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
