"""The tokens of a trace of any format, with the experts of each layer."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from moepack.common.paths import PathOrPaths, path_texts
from moepack.traces.formats.reading import Contents, TracedModel, options_of, read_file
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.model import Bytes, Counts, Ints, Origin, Phase, Shorts, Unknown, changes
from moepack.traces.steps import ALL_PHASES, Steps, StepStream

_PHASES: dict[int, Literal["prefill", "decode"]] = {
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
}


class Token(NamedTuple):
    """A token: the experts that it used, by layer, in the model's order.

    `layers` [n] are layers, `experts` [n, k] their experts, -1 if a layer used fewer than k.
    `position` counts the tokens of its request from 0, or those of the file if requests are
    unknown: then `request` is None. `phase` is None if unknown.
    """

    request: int | None
    position: int
    phase: Literal["prefill", "decode"] | None
    layers: Shorts
    experts: NDArray[np.int32]


class Routing(NamedTuple):
    """Consecutive tokens of one file; a row is one layer of one token.

    `position` [rows], `phase` [rows] (0 unknown, 1 prefill, 2 decode) and `request` [rows], which
    is None if requests are unknown, are as those of a Token. `layer` [rows] is the layer, `experts`
    [rows, k] its experts in the order of the trace, -1 if it used fewer than k. Rows `starts[t]` to
    `starts[t + 1]` are those of token t.
    """

    request: Ints | None
    position: Ints
    phase: Bytes
    layer: Shorts
    experts: NDArray[np.int32]
    starts: Ints

    def tokens(self) -> Iterator[Token]:
        """Yield the tokens one by one; their arrays are views."""
        starts = self.starts.tolist()
        first = self.starts[:-1]
        requests = [None] * len(first) if self.request is None else self.request[first].tolist()
        positions, phases = self.position[first].tolist(), self.phase[first].tolist()
        layer, experts = self.layer, self.experts
        for n, (request, position, phase) in enumerate(
            zip(requests, positions, phases, strict=True)
        ):
            rows = slice(starts[n], starts[n + 1])
            yield Token(request, position, _PHASES.get(phase), layer[rows], experts[rows])


@dataclass
class Trace:
    """The tokens of one or several files, read again by each `tokens` or `batches`.

    After the first token, `unknown` are the facts that the files lack ("requests", "phases",
    "layers", "later tokens"), and `expert_counts` the experts of each layer, None if unknown. At
    the end `warnings` counts skipped items, by problem, and `counted_selections` the selections
    without their tokens: these are in no batch.
    """

    paths: tuple[str, ...]
    options: ReadOptions = field(repr=False)
    unknown: frozenset[str] = frozenset()
    expert_counts: Mapping[int, int] | None = None
    counted_selections: int = 0
    warnings: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)

    def tokens(self) -> Iterator[Token]:
        """Yield the tokens one by one, in their order. Raises as `batches`."""
        for batch in self.batches():
            yield from batch.tokens()

    def batches(self) -> Iterator[Routing]:
        """Yield many tokens at a time, in their order, in memory that does not grow with the trace.

        Requests are numbered over all files. Raises TraceError for faults in a file and for files
        of counts alone, MachineError for one that cannot be read, and RequestError for one with the
        same selections as another.
        """
        self.warnings.clear()
        self.counted_selections = 0
        contents, stream = Contents(), StepStream(ALL_PHASES)
        position, has_requests = 0, False
        for path in self.paths:
            for item in read_file(path, self.options, contents, self.warnings):
                if isinstance(item, Origin):
                    has_requests = Unknown.REQUESTS not in item.unknown
                    self.unknown |= {str(unknown) for unknown in item.unknown}
                    self.expert_counts = (self.options.shape or item).expert_counts
                elif isinstance(item, Counts):
                    self.counted_selections += int(item.counts.sum())
                steps = stream.add(item)
                if steps is not None:
                    numbers = np.arange(steps.token_count, dtype=np.int64)
                    begins = np.where(steps.is_first, numbers, -position)
                    positions = numbers - np.maximum.accumulate(begins)
                    position = int(positions[-1]) + 1
                    yield _routing(steps, positions, has_requests)
        if not stream.token_count:
            hint = "only counts are known: moepack.measure_hotness takes them"
            raise TraceError("no tokens in it", path=self.paths[0], hint=hint)


def open_trace(
    paths: PathOrPaths, *, model: TracedModel | None = None, options: ReadOptions = ReadOptions()
) -> Trace:
    """Return the tokens of a trace of any format, or of several files of one model.

    With `model` (a source, a pack, open or not, or a shape) selections that it cannot have made are
    refused. Nothing is read yet. Raises RequestError without a file, and the errors of opening the
    model.
    """
    return Trace(tuple(path_texts(paths, "paths")), options_of(options, model))


def _routing(steps: Steps, positions: Ints, has_requests: bool) -> Routing:
    count = len(steps.layer)
    begins = changes(steps.layer)
    begins[steps.starts[:-1]] = True
    first = np.flatnonzero(begins)
    lengths = np.diff(first, append=count)
    width = int(lengths.max())
    if count == width * len(first):
        experts = steps.expert.reshape(-1, width).astype(np.int32)
    else:
        experts = np.full((len(first), width), -1, np.int32)
        rows = np.repeat(np.arange(len(first)), lengths)
        experts[rows, np.arange(count) - first[rows]] = steps.expert
    starts = np.searchsorted(first, steps.starts)
    row_counts = np.diff(starts)
    return Routing(
        np.repeat(steps.request, row_counts) if has_requests else None,
        np.repeat(positions, row_counts),
        np.repeat(steps.phase, row_counts),
        steps.layer[first],
        experts,
        starts,
    )
