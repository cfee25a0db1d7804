"""Moepack's own trace file: writing it, as layouts/TRACE.md specifies it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

import numpy as np

from moepack.common.errors import MachineError, RequestError, TraceError
from moepack.storage.atomic import publish, refuse_existing
from moepack.storage.folders import try_lock
from moepack.storage.regular_file import open_regular
from moepack.traces import file_records
from moepack.traces.compressed import TraceStream
from moepack.traces.file import HEADER_DATA, RECORDED, FileReader, Position, encode_record, read
from moepack.traces.file_records import Kind
from moepack.traces.model import Counts, Item, Items, Origin, Tokens, join, selected
from moepack.traces.validation import Checks

_RECORD_SELECTIONS = 1 << 18


class Writer:
    """Writes a new trace file, or continues one; a context manager.

    A new file appears under its name when it is whole. If an exception ends the `with`, records
    since the last `keep` are removed, all of them if nothing was kept. One process at a time writes
    to a file. The rest of a killed import is overwritten; that of a killed recording is kept, and
    `resume` continues it.

    With `resume` an existing file is continued, without the last request if the file has no end: it
    may have been cut. Raises MachineError for system errors, RequestError if a recording is in the
    way, TraceError if the file to continue is no trace file.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path = os.fspath(path)
        self._resumes = resume
        self._is_published = resume and Path(self.path).exists()
        self._partial = self.path if self._is_published else f"{self.path}.partial"
        self._waiting: list[Tokens] = []
        self._waiting_count = 0
        self._position = Position()
        self._kept: Position | None = None
        self._has_end = False
        """Whether the file on disk has its end, at the position that was kept."""
        self._has_changed = False
        self.was_cut = False
        """Whether the file that is continued had no end."""
        with self._machine_errors():
            self._file: IO[bytes] = open(self._partial, "r+b", opener=_open_or_create)  # noqa: SIM115
        try:
            self._begin()
        except BaseException:
            self._file.close()
            raise

    def _begin(self) -> None:
        with self._machine_errors():
            if not try_lock(self._file.fileno(), self._partial):
                raise MachineError("another process writes to it", path=self.path)
        if self._is_published or (self._resumes and os.path.getsize(self._partial)):
            self._continue()
            return
        if not _can_be_made_again(self._partial):
            raise RequestError(
                "the unfinished file of an earlier run is in the way",
                path=self._partial,
                hint="`moepack trace record --resume` continues it; or rename or delete it",
            )
        with self._machine_errors():
            self._file.truncate(0)
            self._file.write(HEADER_DATA)

    def _continue(self) -> None:
        """Read an existing file to find the position of the next record."""
        with TraceStream(self._partial) as stream:
            if not stream.is_plain:
                problem, hint = "it is compressed", "unpack it, or import it into another file"
                raise TraceError(problem, path=self.path, hint=hint)
            reader = FileReader(stream, Checks(self._partial))
            for _ in reader.items():
                pass
        self._has_end, self.was_cut = reader.is_whole, not reader.is_whole
        position = reader.request_position if self.was_cut else reader.position
        self._kept = self._position = position

    def held_items(self) -> Items:
        """Yield the items of the file that is continued."""
        if self._kept is None:
            return
        with TraceStream(self._partial) as stream:
            reader = FileReader(stream, Checks(self._partial))
            for item in reader.items():
                if reader.position.offset > self._kept.offset:
                    return
                yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.close()
        else:
            self._undo()

    def add(self, item: Item) -> None:
        """Write an origin or a piece; small pieces are gathered to larger records."""
        if isinstance(item, Tokens):
            if not np.diff(item.starts).all():
                item = selected(item, np.ones(len(item.layer), np.bool_))
            if len(item.request):
                self._waiting.append(item)
                self._waiting_count += len(item.layer)
            if self._waiting_count >= _RECORD_SELECTIONS:
                self._write_waiting()
            return
        self._write_waiting()
        if isinstance(item, Origin):
            self._write(item)
            return
        places = np.flatnonzero(item.counts)
        for start in range(0, len(places), _RECORD_SELECTIONS):
            part = places[start : start + _RECORD_SELECTIONS]
            self._write(Counts(item.phase, item.layer[part], item.expert[part], item.counts[part]))

    def keep(self) -> None:
        """Write all items so far, so that they outlive this process, and an exception."""
        self._write_waiting()
        self._write_end()

    def close(self) -> None:
        """Write the rest, and publish the file."""
        try:
            self.keep()
            with self._machine_errors():
                os.fsync(self._file.fileno())
                if not self._is_published:
                    publish(self._partial, self.path)
                self._file.close()
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Restore the file to the last `keep`."""
        with contextlib.suppress(OSError):  # the error that led here says more
            self._file.close()  # first, since it may still write
        with contextlib.suppress(OSError):
            if self._kept is None:
                Path(self._partial).unlink(missing_ok=True)
                return
            if not self._has_changed:
                return
            if not self._has_end:
                with open(self._partial, "r+b") as self._file:
                    self._position = self._kept
                    self._write_end()
            if not self._is_published:
                publish(self._partial, self.path)

    def _write_waiting(self) -> None:
        waiting, self._waiting, self._waiting_count = self._waiting, [], 0
        if waiting:
            for part in _parts(join(waiting)):
                self._write(part)

    def _write(self, item: Item) -> None:
        """Write a record in place of the end."""
        head = self._put(*file_records.encode(item))
        self._position = self._position.after(head, item)

    def _write_end(self) -> None:
        """Write the end, which the next record replaces."""
        if not self._has_end:
            self._put(Kind.END, self._position.encode_end())
            self._kept, self._has_end = self._position, True

    def _put(self, kind: Kind, payload: bytes) -> bytes:
        """Write a record, the last of the file; return its header."""
        head, stored = encode_record(kind, payload)
        self._has_end, self._has_changed = False, True
        with self._machine_errors():
            self._file.seek(self._position.offset)
            self._file.truncate()
            self._file.write(head + stored)
            self._file.flush()
        return head

    @contextlib.contextmanager
    def _machine_errors(self) -> Iterator[None]:
        """Raise MachineError for system errors."""
        try:
            yield
        except OSError as error:
            raise MachineError(f"cannot write: {error.strerror}", path=self.path) from None


def check_target(path: str, *, force: bool) -> None:
    """Raise RequestError if a trace file must not be written there."""
    if os.path.exists(path) and not os.path.isfile(path):
        problem = "not a file: a trace appears under its name when it is whole"
        raise RequestError(problem, path=path)
    refuse_existing(path, force=force)


def _parts(tokens: Tokens) -> Iterator[Tokens]:
    """Cut many tokens into some that fit into a record."""
    first, count = 0, len(tokens.request)
    while first < count:
        most = int(tokens.starts[first]) + 8 * _RECORD_SELECTIONS
        last = max(int(np.searchsorted(tokens.starts, most, "right")) - 1, first + 1)
        last = min(last, first + _RECORD_SELECTIONS)
        start, end = int(tokens.starts[first]), int(tokens.starts[last])
        yield Tokens(
            tokens.request[first:last],
            tokens.phase[first:last],
            tokens.starts[first : last + 1] - start,
            tokens.layer[start:end],
            tokens.expert[start:end],
        )
        first = last


def _open_or_create(path: str, flags: int) -> int:
    return open_regular(path, flags | os.O_CREAT)


def _can_be_made_again(path: str) -> bool:
    """Return whether the rest of a killed process is empty, or of an import."""
    if not os.path.getsize(path):
        return True
    try:
        with TraceStream(path) as stream:
            first = next(read(stream, Checks(path, lenient=True)), None)
    except TraceError:
        return False
    return first is None or (isinstance(first, Origin) and first.format != RECORDED)
