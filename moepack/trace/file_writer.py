"""Moepack's own trace file: writing it, as layouts/TRACE.md specifies it."""

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from moepack.errors import MachineError, RequestError, TraceError
from moepack.storage.atomic import publish, refuse_existing
from moepack.storage.regular_file import open_regular
from moepack.trace import file_frames, file_records
from moepack.trace.compressed import TraceStream
from moepack.trace.file import RECORDED, FileReader, Position, read
from moepack.trace.file_frames import Kind
from moepack.trace.model import Item, Items, Origin, Tokens, selected
from moepack.trace.validation import Checks

_RECORD_SELECTIONS = 1 << 18


class Writer:
    """Writes a new trace file, or goes on with one; a context manager.

    A new file appears under its name when it is whole. Where an exception ends the `with`, what was
    written since the last `keep` is taken back, all of it where nothing was kept. One process at a
    time writes to a file. What a killed import left is written over; what a killed recording left
    is kept, and `resume` goes on with it.

    With `append` a file that exists is added to; `resume` does that as well, without the last
    request where the file has no end: it may have been cut. Raises MachineError for what the system
    refuses, RequestError where a file that is kept is in the way, TraceError for a file to go on
    with that is none.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, append: bool = False, resume: bool = False
    ) -> None:
        self.path = os.fspath(path)
        self._resumes = resume
        self._is_published = (append or resume) and Path(self.path).exists()
        self._partial = self.path if self._is_published else f"{self.path}.partial"
        self._waiting: list[Tokens] = []
        self._waiting_count = 0
        self._position = Position()
        self._kept: Position | None = None
        self._has_end = False
        """Whether the file on disk ends with an end, at the position that was kept."""
        self._must_cut = False
        """Whether something, the end perhaps, stands on disk where the next record goes."""
        self._has_changed = False
        self.was_cut = False
        """Whether a file that is gone on with had no end."""
        is_left = False
        try:
            try:
                mode = "r+b" if self._is_published else "xb"
                self._file: IO[bytes] = open(self._partial, mode, opener=open_regular)  # noqa: SIM115
            except FileExistsError:
                self._file, is_left = open(self._partial, "r+b", opener=open_regular), True  # noqa: SIM115
        except OSError as error:
            raise self._error(error) from None
        try:
            self._begin(is_left)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, is_left: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MachineError("another process writes to it", path=self.path) from None
        if self._is_published or (is_left and self._resumes and os.path.getsize(self._partial)):
            self._go_on()
            return
        if is_left and not _can_be_made_again(self._partial):
            raise RequestError(
                "the file of an earlier run that did not end is in the way",
                path=self._partial,
                hint="`moepack trace record --resume` goes on with it; or rename it, or delete it",
            )
        try:
            self._file.truncate(0)
            self._file.write(file_frames.encode_header())
        except OSError as error:
            raise self._error(error) from None

    def _go_on(self) -> None:
        """Find where to write in a file that holds something."""
        with TraceStream(self._partial) as stream:
            if not stream.is_plain:
                problem, hint = "it is compressed", "unpack it, or import it into another file"
                raise TraceError(problem, path=self.path, hint=hint)
            reader = FileReader(stream, Checks(self._partial))
            for _ in reader.items():
                pass
        self._has_end, self.was_cut, self._must_cut = reader.is_whole, not reader.is_whole, True
        is_doubtful = self._resumes and self.was_cut
        self._kept = self._position = reader.request_position if is_doubtful else reader.position

    def held_items(self) -> Items:
        """Read what was in the file before anything is added."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._take_back()

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
            self._write(Kind.ORIGIN, file_records.encode_origin(item), item)
        else:
            for part in file_records.parts_of_counts(item, _RECORD_SELECTIONS):
                self._write(Kind.COUNTS, file_records.encode_counts(part), part)

    def keep(self) -> None:
        """Write out all that was added, so that it outlives this process, and an exception."""
        self._write_waiting()
        self._write_end()

    def close(self) -> None:
        """Write the rest, and let the file appear."""
        try:
            self.keep()
            os.fsync(self._file.fileno())
            if not self._is_published:
                publish(self._partial, self.path)
            self._file.close()
        except OSError as error:
            self._take_back()
            raise self._error(error) from None
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Leave what was kept, and nothing of what came after it."""
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
                    self._position, self._must_cut = self._kept, True
                    self._write_end()
            if not self._is_published:
                publish(self._partial, self.path)

    def _write_waiting(self) -> None:
        waiting, self._waiting, self._waiting_count = self._waiting, [], 0
        if waiting:
            for part in file_records.parts(file_records.join(waiting), _RECORD_SELECTIONS):
                self._write(Kind.TOKENS, file_records.encode_tokens(part), part)

    def _write(self, kind: Kind, payload: bytes, item: Item) -> None:
        """Write a record where the end is, or will be."""
        stored = file_frames.compress(payload)
        head = file_frames.encode_head(kind, payload, stored)
        try:
            self._cut()
            self._file.write(head + stored)
        except OSError as error:
            raise self._error(error) from None
        end = self._position.offset + len(head) + len(stored)
        self._position = self._position.after(head, end, item)

    def _write_end(self) -> None:
        """Close the file, which the next record opens again."""
        if self._has_end:
            return
        payload = self._position.totals.encode()
        stored = file_frames.compress(payload)
        try:
            self._cut()
            self._file.write(file_frames.encode_head(Kind.END, payload, stored) + stored)
            self._file.flush()
        except OSError as error:
            raise self._error(error) from None
        self._kept, self._has_end, self._must_cut = self._position, True, True

    def _cut(self) -> None:
        """Cut off what stands where the next record goes."""
        if self._must_cut:
            self._file.seek(self._position.offset)
            self._file.truncate()
        self._has_end, self._must_cut, self._has_changed = False, False, True

    def _error(self, error: OSError) -> MachineError:
        return MachineError(f"cannot write: {error.strerror}", path=self.path)


def check_target(path: str, *, append: bool, force: bool) -> None:
    """Raise RequestError where a trace file is not to be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        problem = "not a file: a trace appears under its name when it is whole"
        raise RequestError(problem, path=path)
    refuse_existing(path, force=force, append=append)


def _can_be_made_again(path: str) -> bool:
    """Say whether what a killed process left holds nothing, or what was imported."""
    if not os.path.getsize(path):
        return True
    try:
        with TraceStream(path) as stream:
            first = next(read(stream, Checks(path, lenient=True)), None)
    except TraceError:
        return False
    return first is None or (isinstance(first, Origin) and first.format != RECORDED)
