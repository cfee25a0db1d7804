"""Moepack's own trace file: records that are compressed and checked one by one.

The format is specified in layouts/TRACE.md; `file_records` has the payloads.
"""

import contextlib
import fcntl
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from moepack import digest
from moepack.errors import MachineError, RequestError, TraceError
from moepack.storage.atomic import publish, refuse_existing
from moepack.trace import file_records
from moepack.trace.compressed import TraceStream, zstd
from moepack.trace.file_records import Kind
from moepack.trace.model import Counts, Item, Items, Origin, Piece, Tokens, selected
from moepack.trace.validation import Checks

MAGIC = b"MOETRACE"
VERSION = 1
RECORDED = "recorded"
"""The format of origins that came from a recording."""
MAX_LENGTH = 1 << 26
"""Of a record, stored or not, in bytes."""
_HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct("<IIIIQ")
_RECORD_SELECTIONS = 1 << 18
_LEVEL = 9


class Writer:
    """Writes a new trace file, or appends to one; a context manager.

    A new file appears under its name when it is whole. Where an exception ends the `with`, what was
    written since the last `keep` is taken back, all of it where nothing was kept. One process at a
    time writes to a file. What a killed import left is written over; what a killed recording left
    is kept. Raises MachineError for what the system refuses, RequestError where a file that is
    kept is in the way, TraceError for a file to append to that is none.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        self.path = os.fspath(path)
        self._appends = append and Path(self.path).exists()
        self._partial = self.path if self._appends else f"{self.path}.partial"
        self._waiting: list[Tokens] = []
        self._waiting_count = 0
        is_left = False
        try:
            try:
                self._file: IO[bytes] = open(self._partial, "r+b" if self._appends else "xb")  # noqa: SIM115
            except FileExistsError:
                self._file, is_left = open(self._partial, "r+b"), True  # noqa: SIM115
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
        if is_left and not _can_be_made_again(self._partial):
            problem = "the file of an earlier run that did not end is in the way"
            hint = "what it holds can be read: rename it, or delete it"
            raise RequestError(problem, path=self._partial, hint=hint)
        try:
            if self._appends:
                self._kept = _end_of_records(self.path)
                self._file.truncate(self._kept)
                self._file.seek(self._kept)
            else:
                self._kept = 0
                self._file.truncate(0)
                self._file.write(_HEADER.pack(MAGIC, VERSION, 0))
        except OSError as error:
            raise self._error(error) from None

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
            self._waiting.append(item)
            self._waiting_count += len(item.layer)
            if self._waiting_count >= _RECORD_SELECTIONS:
                self._write_waiting()
            return
        self._write_waiting()
        if isinstance(item, Origin):
            self._write(Kind.ORIGIN, file_records.encode_origin(item))
        else:
            for part in file_records.parts_of_counts(item, _RECORD_SELECTIONS):
                self._write(Kind.COUNTS, file_records.encode_counts(part))

    def keep(self) -> None:
        """Write out all that was added, so that it outlives this process, and an exception."""
        self._write_waiting()
        try:
            self._file.flush()
            self._kept = self._file.tell()
        except OSError as error:
            raise self._error(error) from None

    def close(self) -> None:
        """Write the rest, and let the file appear."""
        try:
            self._write_waiting()
            self._file.flush()
            os.fsync(self._file.fileno())
            if not self._appends:
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
            if self._kept:
                os.truncate(self._partial, self._kept)
                publish(self._partial, self.path)
            else:
                Path(self._partial).unlink(missing_ok=True)

    def _write_waiting(self) -> None:
        waiting, self._waiting, self._waiting_count = self._waiting, [], 0
        if waiting:
            for part in file_records.parts(file_records.join(waiting), _RECORD_SELECTIONS):
                self._write(Kind.TOKENS, file_records.encode_tokens(part))

    def _write(self, kind: int, payload: bytes) -> None:
        stored = zstd.compress(payload, _LEVEL)
        head = _RECORD.pack(kind, len(stored), len(payload), 0, digest.of(payload))
        try:
            self._file.write(head)
            self._file.write(stored)
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> MachineError:
        return MachineError(f"cannot write: {error.strerror}", path=self.path)


def read(stream: TraceStream, checks: Checks) -> Items:
    """Read a trace file record by record. Raises TraceError for what is wrong in it."""
    _check_header(stream.read_whole(_HEADER.size), stream.path)
    offset = _HEADER.size
    origin: Origin | None = None
    while head := stream.read_whole(_RECORD.size):
        place = f"record at byte {offset}"
        payload = _read_payload(stream, head, place)
        if payload is None:
            checks.fault(
                "the last record is cut short",
                place,
                hint="--lenient reads what is before it, and appending overwrites it",
            )
            return
        item = _decode(head, payload, stream.path, place)
        if origin is None and not isinstance(item, Origin):
            raise TraceError("a record before any origin", path=stream.path, place=place)
        origin = item if isinstance(item, Origin) else origin
        yield item if isinstance(item, Origin) else _checked(item, checks, place)
        offset += _RECORD.size + _RECORD.unpack(head)[1]


def check_target(path: str, *, append: bool, force: bool) -> None:
    """Raise RequestError where a trace file is not to be written."""
    if os.path.exists(path) and not os.path.isfile(path):
        problem = "not a file: a trace appears under its name when it is whole"
        raise RequestError(problem, path=path)
    refuse_existing(path, force=force, append=append)


def held_items(path: str, append: bool) -> Items:
    """Read what is in a trace file before anything is added."""
    if not append or not Path(path).exists():
        return
    with TraceStream(path) as stream:
        yield from read(stream, Checks(path))


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


def _read_payload(stream: TraceStream, head: bytes, place: str) -> bytes | None:
    """Read, unpack and check one payload; None where the file ends within it."""
    if len(head) < _RECORD.size:
        return None
    _, stored_length, length, zero, expected = _RECORD.unpack(head)
    if max(stored_length, length) > MAX_LENGTH or zero:
        raise TraceError("not a record", path=stream.path, place=place)
    stored = stream.read_whole(stored_length)
    if len(stored) < stored_length:
        return None
    unpacking = zstd.ZstdDecompressor()
    try:
        payload: bytes = unpacking.decompress(stored, length + 1)
    except zstd.ZstdError as error:
        raise TraceError(f"damaged: {error}", path=stream.path, place=place) from None
    is_whole = unpacking.eof and not unpacking.unused_data and len(payload) == length
    if not is_whole or digest.of(payload) != expected:
        problem = "damaged: it does not have its digest"
        raise TraceError(problem, path=stream.path, place=place)
    return payload


def _decode(head: bytes, payload: bytes, path: str, place: str) -> Item:
    kind = _RECORD.unpack(head)[0]
    try:
        return file_records.decode(Kind(kind), payload)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise TraceError(f"not a record: {error}", path=path, place=place) from None


def _check_header(header: bytes, path: str) -> None:
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise TraceError("not a trace file", path=path, expected=MAGIC.decode())
    _, version, zero = _HEADER.unpack(header)
    if version != VERSION or zero:
        raise TraceError(
            "a trace file of another version", path=path, expected=VERSION, found=version
        )


def _end_of_records(path: str) -> int:
    """Find where the last whole record ends.

    Raises TraceError where a length is damaged: what lies behind it would be lost.
    """
    with open(path, "rb") as file:
        _check_header(file.read(_HEADER.size), path)
        length = os.fstat(file.fileno()).st_size
        end = _HEADER.size
        while len(head := file.read(_RECORD.size)) == _RECORD.size:
            kind, stored_length, unpacked_length, zero, _ = _RECORD.unpack(head)
            is_cut = end + _RECORD.size + stored_length > length
            wrong = (
                kind not in set(Kind) or zero or max(stored_length, unpacked_length) > MAX_LENGTH
            )
            if wrong or (is_cut and _is_whole_frame(file.read())):
                place = f"record at byte {end}"
                raise TraceError("damaged: not a record", path=path, place=place)
            if is_cut:
                break
            end += _RECORD.size + stored_length
            file.seek(end)
    return end


def _is_whole_frame(data: bytes) -> bool:
    """Say whether data that should be the beginning of a frame has its end as well."""
    unpacking = zstd.ZstdDecompressor()
    try:
        unpacking.decompress(data, MAX_LENGTH)
    except zstd.ZstdError:
        return True
    return bool(unpacking.eof)


def _checked(piece: Piece, checks: Checks, place: str) -> Piece:
    layer, expert = piece.layer.astype(np.int64), piece.expert.astype(np.int64)
    if isinstance(piece, Counts):
        return checks.counts(piece.phase, layer, expert, piece.counts, lambda _: place)
    right = checks.fitting(layer, expert, lambda _: place)
    fitting = piece if right is None else selected(piece, right)
    return checks.tokens(fitting, lambda _: place)
