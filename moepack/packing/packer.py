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

A file that an interrupted pack finished is trusted by its name, kind and length, which the journal
stands for; from then on it is watched as the new ones are. `verify` proves the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.common.errors import (
    MachineError,
    MoepackError,
    RequestError,
    SourceError,
    write_failure,
)
from moepack.common.pack_files import JOURNAL_NAME
from moepack.common.phases import Progress, advancing
from moepack.pack.format import manifest
from moepack.pack.format.index import Index
from moepack.pack.format.source_entry import SourceEntry
from moepack.packing import index_encoder, strong_digests
from moepack.packing.commit import TEMPORARY_NAME, UnsettledError, commit, settling
from moepack.packing.finished_files import FinishedFile, makes_sense, on_disk
from moepack.packing.journal import Journal
from moepack.packing.plan import DENSE_NAME, Plan
from moepack.packing.shard_hashes import check_shard_hashes
from moepack.packing.target_directory import WatchedFiles, prepare
from moepack.source.shards import Source
from moepack.storage.atomic import sync_directory
from moepack.storage.copying import Copier
from moepack.storage.extents import NewFile
from moepack.storage.inputs import Inputs
from moepack.storage.regular_file import remove
from moepack.storage.scattering import Scatterer
from moepack.storage.space import check_space
from moepack.version import __version__

TOOL = f"moepack {__version__}"
DEFAULT_THREADS = 4


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
) -> tuple[int, int]:
    """Write the pack that `plan` describes into the directory `target`.

    With `strong` all written bytes are read once more, and have a SHA-256 in the index, and the
    index has one in the manifest. `described` is the source as the manifest will state it.
    `progress` is called from one thread at a time. Returns the bytes of data files written now, and
    how many files were taken over from an interrupted pack.

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
        unfinished = _UnfinishedPack(source, described, plan, path, journal, created)
        try:
            unfinished.begin(resume)
            counts = unfinished.write_files(threads, progress)
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

    source: Source
    described: SourceEntry
    plan: Plan
    path: Path
    journal: Journal
    created: bool
    begun: bool = False

    def __post_init__(self) -> None:
        self.watched = WatchedFiles(self.path)
        self.files = {file.name: file for file in self.plan.new_files()}

    def begin(self, resume: bool) -> None:
        """Take up the journal, and check that there is space for all missing files."""
        if (self.path / manifest.NAME).exists():  # committed by another packer just now
            raise RequestError("a whole pack is here already", path=self.path)
        identity = self._identity()
        if resume:
            self.journal.resume(identity)
            self._take_over_finished()
            self._remove_unfinished()
        missing_length = sum(file.length for file in self._missing_files())
        check_space(self.path, missing_length + self.plan.index_length)
        if not resume:
            self.journal.begin(identity)
        sync_directory(self.path)
        self.begun = True

    def _identity(self) -> dict[str, Any]:
        """Return the input's identity: files of an interrupted pack are taken over if it is equal.

        A codec's frames depend on its version, beside the layout, which names codec and level.
        """
        plan = self.plan
        identity = {
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
        if plan.layout.codec is not None:
            from moepack.storage.frames import VERSION  # it loads the codec

            identity["version of the codec"] = VERSION
        return identity

    def _take_over_finished(self) -> None:
        """Watch the files that the journal lists; forget any that differ from it."""
        for finished in list(self.journal.finished.values()):
            file = self.files.get(finished.name)
            if (
                file is None
                or not makes_sense(file, finished, self._is_compressed(file.name))
                or not self.watched.add(file.name, on_disk(self.plan, file, finished).length)
            ):
                self.journal.forget(finished.name)

    def _is_compressed(self, name: str) -> bool:
        """Return whether a file is written with a codec: if there is one, all files of blobs."""
        return self.plan.layout.codec is not None and name != DENSE_NAME

    def _remove_unfinished(self) -> None:
        """Remove the half-written files of a killed packer: they only take space."""
        for name in (*self.files, manifest.INDEX_NAME, TEMPORARY_NAME):
            if name not in self.journal.finished:
                remove(self.path / name)

    def _missing_files(self) -> list[NewFile]:
        return [file for file in self.files.values() if file.name not in self.journal.finished]

    def write_files(self, threads: int, progress: Progress | None) -> tuple[int, int]:
        """Write, sync and record each file that is not finished yet; return as `pack` does."""
        missing = self._missing_files()
        advanced = advancing(progress, sum(file.length for file in missing))
        shards = self.source.shards
        paths, stamps = [shard.path for shard in shards], [shard.stamp for shard in shards]
        compressed = {file.name for file in missing if self._is_compressed(file.name)}
        with Inputs(paths, SourceError, stamps=stamps) as inputs:
            if compressed:
                from moepack.packing.compressed_files import CompressedFiles  # it loads the codec

                files = [file for file in self.plan.files if file.name in compressed]
                writer = CompressedFiles(self.path, inputs, self.plan, advanced)
                writer.write(files, threads, self._record)
            copied = [file for file in missing if file.name not in compressed]
            copier = Scatterer if self.source.is_remote else Copier
            copier(self.path, inputs, advanced).write(
                copied, threads, lambda written: self._record(FinishedFile(*written))
            )
            inputs.check_unchanged()
            if self.source.is_remote and len(missing) < len(self.files):
                check_shard_hashes(self.plan, inputs, self.path, threads)
        names = {file.name for file in missing}
        written = sum(f.length for name, f in self._finished().items() if name in names)
        return written, len(self.files) - len(missing)

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

    def commit(self, strong_threads: int | None) -> None:
        """Commit the pack; `strong_threads` compute strong digests before, None for no digests.

        Raises MachineError if a finished file was changed meanwhile.
        """
        for name, file in self._finished().items():
            if not self.watched.is_unchanged(file):
                self.journal.forget(name)  # else `resume` would trust its length
                raise MachineError(
                    "the file was changed or removed after it was written",
                    path=self.path / name,
                    hint="let nothing else write there, and run the same again with `resume=True`",
                )
        index = index_encoder.encode(self.plan, self.journal.finished)
        if strong_threads is not None:
            paths = [self.path / name for name in self.files]
            index = strong_digests.add(index, paths, strong_threads)
        data = encode_manifest(self.plan, self.described, index, strong=strong_threads is not None)
        commit(self.path, manifest.INDEX_NAME, index, data)
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
        if isinstance(error, MoepackError):
            error.hint = error.hint or hint
        else:
            error.add_note(hint)


def encode_manifest(
    plan: Plan,
    described: SourceEntry,
    index: bytes,
    *,
    strong: bool = False,
    layout: dict[str, Any] | None = None,
) -> bytes:
    """Return the bytes of the manifest of the pack that `plan` describes, with that index.

    With `strong` it has the SHA-256 of the index; `layout` overrules that of the plan.
    """
    entry = manifest.describe_index(index)
    if strong:
        entry = entry._replace(sha256=hashlib.sha256(index).hexdigest())
    decoded = Index(index, entry.name)
    # If nothing was shortened, the pack is as it would be without a codec.
    codec = plan.layout.codec if decoded.codecs else None
    return manifest.encode(
        manifest.Manifest(
            tool=TOOL,
            is_whole=plan.is_whole,
            source=described,
            layout=layout or plan.layout.with_codec(codec).to_json(),
            hotness=plan.hotness_to_json(),
            layers=None if plan.layers is None else list(plan.layers),
            index_entry=entry,
            files=tuple(manifest.FileEntry(file.name, file.length) for file in decoded.files),
        )
    )


def _remove_if_empty(path: Path, created: bool) -> None:
    if created:
        with contextlib.suppress(OSError):
            path.rmdir()
