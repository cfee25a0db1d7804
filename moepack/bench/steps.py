"""Steps of the cache of experts that miss some of them: what `run` waits for, by its own code."""

from __future__ import annotations

import random
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.common.closing import Closing
from moepack.common.errors import RequestError
from moepack.common.sizes import align
from moepack.pack.reading.pack import Pack
from moepack.running.expert_cache import ExpertCache

COUNTS = (1, 2, 4, 8)
"""Missing experts of a step."""
_MAX_LENGTHS = 4
_LEAST_SHARE = 0.01
"""The share of the bytes of all experts below which those of a length do not count."""
_MEMORY = 128 << 20
"""Bytes for experts: enough for huge pages, and less than any model that is streamed."""
_PAGE = 4096
_EDGES = 1 << 16
"""Bytes by which a slot may be longer than an expert, whose parts lie anywhere in pages."""


class StepKind(NamedTuple):
    """Steps that miss `depth` experts of `length` bytes."""

    length: int
    depth: int


class StepMeasurement(Closing):
    """Measures steps on the experts of the pack, or the index, in `folder`.

    With `is_buffered` they are read through the page cache. Raises what `ExpertCache` raises, and
    RequestError if all experts would stay in memory.
    """

    def __init__(self, folder: Path, *, is_buffered: bool = False) -> None:
        with Pack(folder) as pack:
            families = pack.shape.without_mtp().routed.values()
        totals = Counter[int]()
        for family in families:
            totals[family.expert_length] += family.expert_length * family.expert_count
        slot, total = align(max(totals), _PAGE) + _EDGES, totals.total()
        for most in reversed(COUNTS):
            memory = max(2 * most * slot, min(_MEMORY, total // 8))
            lengths = [one for one in most_used_lengths(totals) if totals[one] > memory]
            if lengths:
                break
        else:
            raise RequestError("too few experts to measure reads of them")
        self._steps: dict[StepKind, Iterator[tuple[int, list[int]]]] = {}
        for length in lengths:
            counts = {
                one.layer: one.expert_count for one in families if one.expert_length == length
            }
            for count in COUNTS:
                if count <= min(most, *counts.values()):
                    self._steps[StepKind(length, count)] = _steps(counts, count)
        self._cache = ExpertCache(
            folder,
            memory,
            policy="lru",  # steps come in an order of which it keeps none
            check="never",
            backend="buffered" if is_buffered else "auto",
            experts_used=most,
        )
        for (length, count), steps in self._steps.items():  # slots that were never used are slower
            for _ in range(1 + memory // (length * count * len(self._steps))):
                self._cache.use(*next(steps))

    @property
    def kinds(self) -> Sequence[StepKind]:
        """The kinds of steps that can be measured."""
        return tuple(self._steps)

    def measure(self, kind: StepKind, seconds: float) -> float:
        """Do steps until the `seconds` end, at least one; return the bytes read in a second."""
        steps, read = self._steps[kind], self._cache.usage.read_length
        start = time.perf_counter()
        while True:
            self._cache.use(*next(steps))
            length, spent = self._cache.usage.read_length - read, time.perf_counter() - start
            if spent >= seconds and length:
                return length / spent

    def close(self) -> None:
        """Close the cache."""
        self._cache.close()


def _steps(counts: Mapping[int, int], count: int) -> Iterator[tuple[int, list[int]]]:
    """Yield layers, each with `count` of its experts, for ever: all in turn, in random order.

    By `counts` of the experts of each layer. LRU finds none of them where they exceed its memory.
    """
    draw, steps = random.Random(count), list[tuple[int, list[int]]]()
    for layer, expert_count in counts.items():
        experts = draw.sample(range(expert_count), expert_count)
        starts = range(0, expert_count - count + 1, count)
        steps += ((layer, experts[start : start + count]) for start in starts)
    draw.shuffle(steps)
    while True:
        yield from steps


def most_used_lengths(totals: Counter[int]) -> list[int]:
    """Return the lengths of experts that have the most bytes, ascending, without small parts.

    `totals` are the bytes of the experts of each length.
    """
    least = _LEAST_SHARE * totals.total()
    return sorted(length for length, total in totals.most_common(_MAX_LENGTHS) if total >= least)


_HEAD_LENGTH, _ROW_LENGTH = 4096, 2048
_F16, _I8 = 1, 24
"""Types of ggml."""


def scratch_header(expert_lengths: Sequence[int], length: int) -> bytes:
    """Return the start of a GGUF of `length` bytes, whose layers have experts of these lengths.

    Each layer has as many bytes, which are whatever comes after it.
    """
    room = (length - _HEAD_LENGTH) // len(expert_lengths)
    lengths = [one for one in expert_lengths if 2 * one <= room] or [4 * _ROW_LENGTH]
    tensors, offset = b"", 0
    for layer, one in enumerate(lengths):
        for name in ("ffn_gate_up_exps", "ffn_down_exps"):
            dimensions = (_ROW_LENGTH // 2, one // (2 * _ROW_LENGTH), room // one)
            tensors += _text(f"blk.{layer}.{name}.weight")
            tensors += struct.pack("<I3QIQ", 3, *dimensions, _F16, offset)
            offset += room // one * one // 2
    rest = length - _HEAD_LENGTH - offset
    tensors += _text("rest.weight") + struct.pack("<IQIQ", 1, rest, _I8, offset)
    pairs = _text("general.architecture") + struct.pack("<I", 8) + _text("scratch")
    pairs += _text("scratch.block_count") + struct.pack("<II", 4, len(lengths))
    pairs += _text("general.alignment") + struct.pack("<II", 4, _HEAD_LENGTH)
    header = b"GGUF" + struct.pack("<IQQ", 3, 2 * len(lengths) + 1, 3) + pairs + tensors
    return header.ljust(_HEAD_LENGTH, b"\0")


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
