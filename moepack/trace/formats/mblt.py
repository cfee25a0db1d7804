"""Traces in binary: mbolt's stream of 32-bit numbers."""

import struct
from collections.abc import Generator, Iterator

import numpy as np

from moepack.errors import TraceError
from moepack.trace.compressed import TraceStream
from moepack.trace.formats.assembler import MAX_CALL_SELECTIONS, Assembler, Rows
from moepack.trace.model import Dimensions, Ints, Phase, Piece
from moepack.trace.validation import Checks, shorts

MBLT_MAGIC = b"MBLT"
_VERSION = 1
_HEADER = struct.Struct("<4sii")
_READ_LENGTH = 1 << 20


def read_header(stream: TraceStream, checks: Checks) -> None:
    """Read little-endian int32: magic, version, expert count. Raises TraceError for others."""
    head = stream.read_whole(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MBLT_MAGIC):
        problem = "not an MBLT stream"
        raise TraceError(problem, path=stream.path, expected="MBLT, version 1", found=head)
    _, version, expert_count = _HEADER.unpack(head)
    if version != _VERSION:
        problem = "an MBLT stream of another version"
        raise TraceError(problem, path=stream.path, expected=_VERSION, found=version)
    checks.state(Dimensions(expert_count=expert_count), "byte 8")


def read_records(stream: TraceStream, checks: Checks) -> Iterator[Piece]:
    """Read the int32 behind the header: records of layer, k, token count, and the experts.

    These are k for each token. A call begins where the number of the layer does not rise; one of
    several tokens is prefill.
    """
    records = _Records(checks)
    rest, offset = b"", _HEADER.size
    while data := stream.read_whole(_READ_LENGTH):
        data = rest + data
        numbers = np.frombuffer(data, "<i4", len(data) // 4)
        used = yield from records.add(numbers, offset)
        rest = data[4 * used :]
        offset += 4 * used
    if rest:
        checks.fault("the last record is cut short", f"byte {offset}")
    yield from records.end()


class _Records:
    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._assembler = Assembler(checks, "byte")
        self._last_layer = 1 << 60

    def end(self) -> Iterator[Piece]:
        return iter(self._assembler.end())

    def add(self, numbers: Ints, offset: int) -> Generator[Piece, None, int]:
        """Take whole records, many of a shape at once; give how many numbers they were."""
        at = 0
        while at + 3 <= len(numbers):
            used, count = int(numbers[at + 1]), int(numbers[at + 2])
            if min(used, count) < 1 or used * count > MAX_CALL_SELECTIONS:
                raise TraceError(
                    "not a record",
                    path=self._checks.path,
                    place=f"byte {offset + 4 * at}",
                    expected="layer, experts used, tokens",
                    found=f"{numbers[at]}, {used}, {count}",
                )
            length = 3 + used * count
            alike = numbers[at : at + (len(numbers) - at) // length * length].reshape(-1, length)
            if not len(alike):
                break
            other = np.any(alike[:, 1:3] != (used, count), axis=1)
            alike = alike[: int(np.argmax(other))] if other.any() else alike
            yield from self._take(alike.astype(np.int64), used, count, offset + 4 * at)
            at += alike.size
        return at

    def _take(self, records: Ints, used: int, count: int, offset: int) -> Iterator[Piece]:
        """Take records of one shape [records, 3 + used * count]."""
        per_record = used * count
        layers = records[:, 0]
        layer, expert = np.repeat(layers, per_record), records[:, 3:].ravel()
        record = np.repeat(np.arange(len(records)), per_record)
        token = np.tile(np.repeat(np.arange(count), used), len(records))
        place = offset + record * 4 * (3 + per_record)
        right = self._checks.fitting(layer, expert, lambda index: f"byte {place[index]}")
        if right is not None:
            layer, expert, place = layer[right], expert[right], place[right]
            record, token = record[right], token[right]
        if not len(layer):
            return
        first = np.flatnonzero(np.diff(record, prepend=-1))
        layers = np.concatenate(([self._last_layer], layer[first]))
        self._last_layer = int(layers[-1])
        starts = first[layers[1:] <= layers[:-1]]
        phase = Phase.PREFILL if count > 1 else Phase.DECODE
        request = np.zeros(len(starts), np.int64)
        phases = np.full(len(starts), phase, np.uint8)
        rows = Rows(starts, request, phases, shorts(layer), shorts(expert), place, token)
        yield from self._assembler.add(rows)
