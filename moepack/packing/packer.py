"""Pack: carry a plan out, so that at any moment there is either no pack or a whole one.

The order of events is the promise:

1. the journal is created in the target directory, and locked;
2. each data file is written, synced, and only then entered in the journal, which is synced too;
3. the source is checked once more: a pack of a file that changed meanwhile is not committed;
4. the index is written and synced, then the manifest under a temporary name, then the directory;
5. the manifest is renamed to its name: this is the commit; the directory is synced;
6. the journal is removed.

A crash before 5 leaves a directory without a manifest, which no reader opens, and a journal from
which `resume` continues. A crash after 5 leaves a whole pack, at worst with a journal beside it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moepack import __version__
from moepack.errors import MachineError, MoepackError, RequestError, SourceError
from moepack.format import manifest
from moepack.format.names import JOURNAL_NAME
from moepack.hotness.file import Hotness
from moepack.packing import index_encoder
from moepack.packing.data_files import CopyJobs, ShardFiles
from moepack.packing.journal import Journal, open_journal
from moepack.packing.plan import Plan
from moepack.source import gguf_header
from moepack.source.shards import Source

TOOL = f"moepack {__version__}"
DEFAULT_THREADS = 4
MAX_THREADS = 256


class PackResult(NamedTuple):
    """What `pack` did: bytes of data files written now, and files taken over from before."""

    path: Path
    written_length: int
    resumed_file_count: int


def pack(
    source: Source,
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    hotness: Hotness | None = None,
    layers: list[int] | None = None,
    resume: bool = False,
    threads: int = DEFAULT_THREADS,
    progress: Callable[[int], None] | None = None,
) -> PackResult:
    """Write the pack that `plan` describes into the directory `target`.

    `hotness` and `layers` are what the plan was made from, for the manifest. `progress` is called
    with the bytes done since its last call, from one thread at a time. Raises RequestError for an
    existing target, SourceError for a source that fails or changes, MachineError for a machine that
    cannot (no space, a failing device), and leaves then what `resume` can continue from.
    """
    path = Path(target)
    with _translated(path):
        created = _prepare(path, resume)
        work = _Work(source, plan, path, _open_journal(path, created), created)
        try:
            work.begin(hotness, layers, resume)
            result = work.write_files(threads, progress)
            work.commit(hotness, layers)
        except BaseException as error:
            work.abandon(error)
            raise
        finally:
            work.journal.close()
    return result


def check_space(path: Path, length: int) -> None:
    """Raise MachineError where fewer than `length` bytes are free where `path` is or will be."""
    free = free_space(path)
    if free < length:
        raise MachineError(
            "not enough space",
            path=path,
            expected=f"{length} bytes",
            found=f"{free} bytes free",
            hint="free some space or choose another file system",
        )


def free_space(path: Path) -> int:
    """Give the bytes that are free where `path` is or will be."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def _prepare(path: Path, resume: bool) -> bool:
    """Make the target directory; say whether it is new. An existing pack is never touched."""
    try:
        path.mkdir()
    except FileExistsError:
        pass
    except OSError as error:
        raise MachineError(f"cannot create: {error.strerror}", path=path) from None
    else:
        _sync_directory(path.absolute().parent)
        return True
    if not path.is_dir():
        raise RequestError("exists, and is no directory", path=path)
    held = {name for name in os.listdir(path) if name != "lost+found"}
    if manifest.NAME in held:
        hint = "choose another directory, or remove it"
        raise RequestError("a whole pack is here already", path=path, hint=hint)
    if JOURNAL_NAME in held and not resume:
        hint = "continue it with --resume, or remove the directory"
        problem = "an interrupted pack is here, or one that is being written"
        raise RequestError(problem, path=path, hint=hint)
    if held and JOURNAL_NAME not in held:
        hint = "choose a new or an empty directory"
        found = ", ".join(sorted(held)[:3])
        raise RequestError("not empty, and no interrupted pack", path=path, found=found, hint=hint)
    return False


@contextlib.contextmanager
def _translated(path: Path) -> Any:
    """Turn what the system says while writing into a MachineError."""
    try:
        yield
    except OSError as error:
        no_space = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = next(iter(getattr(error, "__notes__", ())), None)  # from `abandon`
        if no_space:
            hint = "free some space, then run the same command with --resume"
        raise MachineError(
            "no space left" if no_space else f"cannot write: {error.strerror}",
            path=error.filename or path,
            hint=hint,
        ) from error


class _Work:
    """One pack in the making."""

    def __init__(
        self, source: Source, plan: Plan, path: Path, journal: Journal, created: bool
    ) -> None:
        self.source = source
        self.plan = plan
        self.path = path
        self.journal = journal
        self.created = created
        self.begun = False
        self.shards: list[dict[str, Any]] = []

    def begin(self, hotness: Hotness | None, layers: list[int] | None, resume: bool) -> None:
        """Take up the journal, and check that there is space for what is left to do."""
        if (self.path / manifest.NAME).exists():  # committed by another packer just now
            raise RequestError("a whole pack is here already", path=self.path)
        self.shards = [describe_shard(shard) for shard in self.source.shards]
        identity = {
            "tool": TOOL,
            "source": [
                [shard["header_sha256"], *header.stamp]
                for shard, header in zip(self.shards, self.source.shards, strict=True)
            ],
            "layout": self.plan.layout.to_json(),
            "hotness": hotness.to_json() if hotness else None,
            "layers": layers,
        }
        if resume:
            self.journal.resume(identity)
            self._forget_damaged()
            self._remove_unfinished()
        check_space(self.path, self._missing_length())
        if not resume:
            self.journal.begin(identity)
        self.begun = True

    def _forget_damaged(self) -> None:
        """Redo files that the journal knows and the directory does not hold as it says."""
        planned = {file.name: file for file in self.plan.files}
        for finished in list(self.journal.finished.values()):
            path = self.path / finished.name
            file = planned.get(finished.name)
            if (
                file is None
                or not path.is_file()
                or path.stat().st_size != file.length
                or len(finished.part_digests) != sum(map(len, self.plan.part_numbers(file)))
            ):
                self.journal.forget(finished.name)

    def _remove_unfinished(self) -> None:
        """Remove what a killed packer left half written: it only takes space."""
        leftovers = [file.name for file in self.plan.files]
        leftovers += [manifest.INDEX_NAME, f"{manifest.NAME}.tmp"]
        for name in leftovers:
            if name not in self.journal.finished:
                with contextlib.suppress(FileNotFoundError):
                    (self.path / name).unlink()

    def _missing_length(self) -> int:
        files = (file.length for file in self.plan.files if file.name not in self.journal.finished)
        return sum(files) + self.plan.index_length

    def write_files(self, threads: int, progress: Callable[[int], None] | None) -> PackResult:
        """Write, sync and record each file that is not finished yet."""
        missing = [file for file in self.plan.files if file.name not in self.journal.finished]
        with ShardFiles(self.source) as shard_files:
            jobs = CopyJobs(self.plan, self.path, shard_files, progress)
            jobs.run(missing, threads, self.journal.add)
            shard_files.check_unchanged()
        written = sum(file.length for file in missing)
        return PackResult(self.path, written, len(self.plan.files) - len(missing))

    def commit(self, hotness: Hotness | None, layers: list[int] | None) -> None:
        """Write index and manifest; the rename of the manifest is the commit."""
        index = index_encoder.encode(self.plan, self._part_digests())
        _write_synced(self.path / manifest.INDEX_NAME, index)
        body = manifest.encode(
            tool=TOOL,
            source=describe_source(self.source, self.shards),
            layout=self.plan.layout.to_json(),
            hotness=hotness.to_json() if hotness else None,
            layers=layers,
            index_file=manifest.FileEntry(
                manifest.INDEX_NAME, len(index), int.from_bytes(index[-8:], "little")
            ),
            files=tuple(
                manifest.FileEntry(file.name, file.length, self.journal.finished[file.name].digest)
                for file in self.plan.files
            ),
        )
        temporary = self.path / f"{manifest.NAME}.tmp"
        _write_synced(temporary, body)
        _sync_directory(self.path)
        temporary.rename(self.path / manifest.NAME)
        _sync_directory(self.path)
        self.journal.remove()

    def _part_digests(self) -> array[int]:
        count = sum(len(t.parts) * t.family.expert_count for t in self.plan.templates)
        digests = array("Q", bytes(8 * count))
        for file in self.plan.files:
            in_order = iter(self.journal.finished[file.name].part_digests)
            for numbers in self.plan.part_numbers(file):
                for number in numbers:
                    digests[number] = next(in_order)
        return digests

    def abandon(self, error: BaseException) -> None:
        """Clean up after a failure: what is finished stays for `resume`, the rest goes.

        Where the work was refused before it began, an interrupted pack is left as it was.
        """
        with contextlib.suppress(OSError):
            if (self.path / manifest.NAME).exists():
                self.journal.remove()
                return
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


def describe_shard(shard: gguf_header.Header) -> dict[str, Any]:
    """Give a shard's identity as the manifest holds it: no path, no time."""
    try:
        with open(shard.path, "rb") as file:
            start = hashlib.sha256()
            left = shard.data_offset
            while left and (piece := file.read(min(left, 1 << 20))):
                start.update(piece)
                left -= len(piece)
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror}", path=shard.path) from None
    return {
        "name": os.path.basename(shard.path).encode("utf-8", "backslashreplace").decode(),
        "length": shard.file_length,
        "header_length": min(shard.data_offset, shard.file_length),
        "header_sha256": start.hexdigest(),
    }


def describe_source(source: Source, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the source's identity as the manifest holds it."""
    name = source.value("general.name")
    return {
        "architecture": source.architecture,
        "name": name if isinstance(name, str) else None,
        "shards": shards,
    }


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


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
