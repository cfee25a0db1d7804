"""Hotness: how often each expert was chosen, over how many tokens, and the file that keeps it.

A hotness file is a file of counts, as `trace.formats.counts` reads them.
"""

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moepack import digest
from moepack.errors import TraceError
from moepack.keys import ExpertKey
from moepack.shape import ModelShape
from moepack.storage.atomic import write_whole
from moepack.trace.compressed import TraceStream
from moepack.trace.formats.counts import COLUMNS, EXAMPLE, CountsFile, parse
from moepack.trace.model import Ints
from moepack.trace.validation import Checks


class HeldOut(NamedTuple):
    """The half of what was measured that nothing is to be learned from, to judge by.

    `by` says what divides the halves: `time`, where it is the later one.
    """

    by: str
    token_count: int | None
    counts: Mapping[ExpertKey, int]


class CoveredLength(NamedTuple):
    """The bytes of the hottest experts that make up `percent` of what was chosen.

    `length` is None where all experts do not reach that percent.
    """

    percent: int
    length: int | None


class Coverage(NamedTuple):
    """How many bytes hold how much of what was measured, of `total_length` in all.

    `held_out` says what divides the half that was measured from the half that ranked the experts,
    `token_count` is that half's; both are None where the same counts did both.
    """

    lengths: tuple[CoveredLength, ...]
    total_length: int
    held_out: str | None = None
    token_count: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the coverage as the manifest holds it."""
        return self._asdict() | {"lengths": [covered._asdict() for covered in self.lengths]}


class Hotness(NamedTuple):
    """Counts by expert, and where they came from.

    `token_count` and `request_count` are None where they are not known. `held_out` is the part of
    `counts` that is held out. `origins` describe the traces. `digest` is the file's.
    `chunk_counts` says how many tokens needed each chunk expert, by layer and its number; it is
    None where only the counts of experts are known, as from a hotness file.
    """

    path: str
    counts: Mapping[ExpertKey, int]
    token_count: int | None
    digest: int
    request_count: int | None = None
    held_out: HeldOut | None = None
    origins: tuple[dict[str, Any], ...] = ()
    coverage: Coverage | None = None
    chunk_counts: Mapping[ExpertKey, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the provenance as the manifest holds it."""
        return {
            "digest": digest.to_text(self.digest),
            "token_count": self.token_count,
            "request_count": self.request_count,
            "selection_count": sum(self.counts.values()),
            "origins": list(self.origins),
            "coverage": self.coverage and self.coverage.to_json(),
        }

    def learned(self) -> dict[ExpertKey, int]:
        """Return the counts without what is held out."""
        held = self.held_out.counts if self.held_out else {}
        return {key: count - held.get(key, 0) for key, count in self.counts.items()}

    def chunk_count(self, layer: int, chunk: int, size: int) -> int:
        """Return how many tokens needed a chunk expert that serves `size` experts.

        Where that was not counted, the most that it can be is returned: as if no token had chosen
        two of them, but not more than there are tokens.
        """
        if self.chunk_counts is not None:
            return self.chunk_counts.get(ExpertKey(layer, chunk), 0)
        experts = range(chunk * size, (chunk + 1) * size)
        counts = [self.counts.get(ExpertKey(layer, expert), 0) for expert in experts]
        most = sum(counts) if self.token_count is None else min(sum(counts), self.token_count)
        return max(most, *counts)  # counts may have weights, tokens have none

    def check_fits(self, shape: ModelShape) -> None:
        """Raise TraceError where the counts name a layer or an expert that the model has not."""
        expert_counts = shape.expert_counts
        for layer, expert in sorted(self.counts):
            if expert >= expert_counts.get(layer, 0):
                has_layer = layer in expert_counts
                raise TraceError(
                    f"the model has no {'such expert' if has_layer else 'experts there'}",
                    path=self.path,
                    place=f"layer {layer}, expert {expert}" if has_layer else f"layer {layer}",
                    expected=shape,
                    hint="was it counted on another model?",
                )


def load(path: str) -> Hotness:
    """Read a hotness file; raise TraceError for what is wrong in it."""
    with TraceStream(path) as stream:
        return read(stream, Checks(path))


def read(stream: TraceStream, checks: Checks) -> Hotness:
    """Read a hotness file that is open; `checks` say how strictly."""
    file = parse(stream, checks)
    if not len(file.counts):
        expected = f"lines of {EXAMPLE}"
        raise TraceError("no counts in it", path=stream.path, expected=expected)
    numbers = file.facts.numbers
    return Hotness(
        path=stream.path,
        counts=_by_expert(file, file.counts),
        token_count=numbers.get("tokens"),
        digest=stream.digest,
        request_count=numbers.get("requests"),
        held_out=_held_out(file),
        origins=tuple(file.facts.origins),
    )


def save(hotness: Hotness, path: str | os.PathLike[str]) -> None:
    """Write a hotness file, which appears when it is whole. Raises MachineError."""
    write_whole(path, encode(hotness))


def _held_out(file: CountsFile) -> HeldOut | None:
    if file.held_out is None:
        return None
    counts = {key: count for key, count in _by_expert(file, file.held_out).items() if count}
    return HeldOut(file.facts.held_out_by, file.facts.numbers.get("held_out_tokens"), counts)


def _by_expert(file: CountsFile, counts: Ints) -> dict[ExpertKey, int]:
    order = np.lexsort((file.expert, file.layer))
    columns = (column[order].tolist() for column in (file.layer, file.expert, counts))
    return {ExpertKey(layer, expert): n for layer, expert, n in zip(*columns, strict=True)}


def encode(hotness: Hotness) -> bytes:
    """Write a hotness file; the same counts from the same traces give the same bytes."""
    facts = {"tokens": hotness.token_count, "requests": hotness.request_count}
    lines = [f"# {name}={value}" for name, value in facts.items() if value is not None]
    held = hotness.held_out
    if held is not None:
        lines.append(f"# held_out={held.by}")
        if held.token_count is not None:
            lines.append(f"# held_out_tokens={held.token_count}")
    lines += [f"# origin={json.dumps(origin, sort_keys=True)}" for origin in hotness.origins]
    lines.append(",".join(COLUMNS if held is not None else COLUMNS[:3]))
    for key, count in sorted(hotness.counts.items()):
        row = f"{key.layer},{key.expert},{count}"
        lines.append(row if held is None else f"{row},{held.counts.get(key, 0)}")
    return "\n".join([*lines, ""]).encode()
