"""Traces as CSV: a line a selection (`route-csv`), or a line a layer of a token (`call-csv`)."""

import re
from collections.abc import Iterator

import numpy as np

from moepack.common.errors import TraceError
from moepack.common.shape import ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.traces.compressed import TraceStream
from moepack.traces.formats.assembler import Assembler, Rows
from moepack.traces.formats.number_text import (
    Fault,
    FileHead,
    Places,
    Text,
    Truths,
    out_of_bounds,
    report,
    texts,
)
from moepack.traces.model import (
    MAX_NUMBER,
    Dimensions,
    Ints,
    Items,
    Origin,
    Phase,
    Piece,
    Unknown,
    changes,
)
from moepack.traces.validation import Checks, shorts

ROUTE_HEADING = b"turn,phase,step,layer,slot,expert,"
CALL_HEADING = b"decode_call,token_in_call,layer,occurrence,experts"
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_MODEL = re.compile(rb"^# model=([^\n]{0,1024})", re.M)
_MAX_EXPERT_LENGTH = 1 << 40
_LAYER = re.compile(rb"^# layer=(\d{1,5}) expert_bytes=(\d{1,15})\b", re.M)


class _Table:
    """A table: rows of `column_count` numbers, then experts; `expected` describes a row."""

    heading = b""
    expected = ""
    column_count = 0
    layer_column = 0
    token_column: int

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._assembler = Assembler(checks)
        self._last_call: tuple[int, ...] = ()

    def read(self, stream: TraceStream) -> Iterator[Piece]:
        """Read a whole text."""
        for text in texts(stream):
            yield from self._add(text)
        yield from self._assembler.end()

    def _experts(self, text: Text, first: Places) -> tuple[Places, Places, Ints]:
        """Return the rows among the lines that begin with the numbers `first`.

        They are a row's first number, the number of its first expert, and its number of experts.
        """
        raise NotImplementedError

    def _calls(self, columns: Ints) -> Ints:
        """Return the columns that tell calls apart."""
        return columns[:, :1]

    def _requests(self, columns: Ints) -> Ints:
        return np.zeros(len(columns), np.int64)

    def _phases(self, columns: Ints) -> Ints:
        return np.full(len(columns), Phase.UNKNOWN)

    def _add(self, text: Text) -> Iterator[Piece]:
        """Read the next text; yield the pieces of the trace that are complete."""
        gaps = (b",",) * self.column_count
        first = text.line_starts()
        first, start, counts = self._experts(text, first[text.follow(first, gaps)])
        columns = text.columns(first, self.column_count)
        owner = np.repeat(np.arange(len(first)), counts)
        before = np.cumsum(counts) - counts
        expert = text.values(np.repeat(start - before, counts) + np.arange(len(owner)))
        is_large = np.any(columns < 0, axis=1)
        is_large[owner[expert < 0]] = True
        report(self._checks, text, self._faults(text, first, np.flatnonzero(is_large)))
        kept = ~(is_large | self._left_out(columns))[owner]
        owner, expert = owner[kept], expert[kept]
        layer = columns[:, self.layer_column][owner]
        right = self._checks.fitting(layer, expert, text.place_of(first[owner]))
        if right is not None:
            owner, expert, layer = owner[right], expert[right], layer[right]
        if not len(owner):
            return
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        rows = columns[owner[starts]]
        calls = self._calls(rows)
        begins = changes(*calls.T)
        begins[0] = tuple(calls[0]) != self._last_call
        self._last_call = tuple(calls[-1])
        lines = text.line_numbers(first) + (text.first_line - 1)
        yield from self._assembler.add(
            Rows(
                starts[begins],
                self._requests(rows[begins]),
                self._phases(rows[begins]).astype(np.uint8),
                shorts(layer),
                shorts(expert),
                lines[owner],
                columns[:, self.token_column][owner],
            )
        )

    def _left_out(self, columns: Ints) -> Truths:
        """Return whether each row is left out."""
        return np.zeros(len(columns), np.bool_)

    def _faults(self, text: Text, first: Places, large: Places) -> list[Fault]:
        others = text.other_lines(first)
        others = others[~text.has(others, self.heading)]
        faults = [Fault(int(at), "not a line of this format", self.expected) for at in others]
        for row in first[large].tolist():
            last = int(np.searchsorted(text.starts, text.line_ends[text.line_numbers(row)]))
            values = text.values(np.arange(row, last)).tolist()
            faults.append(out_of_bounds(text, row, values, self.expected))
        return faults


class CallTable(_Table):
    """CSV `decode_call,token_in_call,layer,occurrence,experts`, the experts set apart by spaces.

    Rows of a layer's second router (occurrence 1 and above) are left out and counted.
    """

    heading = CALL_HEADING
    expected = CALL_HEADING.decode()
    column_count = 4
    layer_column = 2
    token_column = 1

    def _experts(self, text: Text, first: Places) -> tuple[Places, Places, Ints]:
        start = first + self.column_count
        beyond = np.searchsorted(text.starts, text.line_ends[text.line_numbers(first)])
        is_joined = text.starts[1:] - text.ends[:-1] == 1
        is_joined &= text.has(text.ends[:-1], b" ")
        breaks = np.concatenate(([0], np.cumsum(~is_joined), [0]))
        last = np.maximum(beyond - 1, start)
        right = (beyond > start) & (breaks[last] == breaks[start])
        right &= text.ends_line(text.ends[beyond - 1])
        return first[right], start[right], (beyond - start)[right]

    def _left_out(self, columns: Ints) -> Truths:
        is_other: Truths = columns[:, 3] > 0
        self._checks.warn("rows of a layer's second router", int(np.count_nonzero(is_other)))
        return is_other


class RouteTable(_Table):
    """CSV `turn,phase,step,layer,slot,expert,…` of BigMoeOnEdge, a row a selection.

    A turn is a request; phase 0 is prefill, which is written layer by layer, 1 is decode, others
    are unknown. A line `# model=… n_layer=… n_expert=… n_expert_used=…` describes the model.
    """

    heading = ROUTE_HEADING
    expected = ROUTE_HEADING.decode() + "…"
    column_count = 5
    layer_column = 3
    token_column = 2

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self._turn = self._request = -1

    def _add(self, text: Text) -> Iterator[Piece]:
        """Check the model that the text states, then read it."""
        # Looking for lines takes many times as long as looking for bytes.
        for match in _MODEL.finditer(text.data) if b"\n# model=" in text.data else ():
            self._checks.state(_dimensions(match), f"line {text.line_of(match.start())}")
        yield from super()._add(text)

    def _experts(self, text: Text, first: Places) -> tuple[Places, Places, Ints]:
        """Take one expert a row; the columns behind it do not matter."""
        behind = text.ends[first + 5]
        first = first[(text.bytes[behind] == ord(",")) | text.ends_line(behind)]
        return first, first + 5, np.ones(len(first), np.int64)

    def _calls(self, columns: Ints) -> Ints:
        """Tell decode steps apart, and prefills by their turn."""
        calls = columns[:, :3].copy()
        calls[columns[:, 1] == 0, 2] = 0
        return calls

    def _requests(self, columns: Ints) -> Ints:
        """Count the turns: their numbers may be any."""
        turns = np.concatenate(([self._turn], columns[:, 0]))
        requests = self._request + np.cumsum(turns[1:] != turns[:-1])
        self._turn, self._request = int(turns[-1]), int(max(requests, default=self._request))
        return requests

    def _phases(self, columns: Ints) -> Ints:
        phase = columns[:, 1]
        return np.select([phase == 0, phase == 1], [Phase.PREFILL, Phase.DECODE], Phase.UNKNOWN)


def read_calls(stream: TraceStream, checks: Checks) -> Items:
    """Read a `CallTable`'s file."""
    yield Origin("call-csv", stream.name, frozenset({Unknown.REQUESTS, Unknown.PHASES}))
    yield from CallTable(checks).read(stream)


def read_route(stream: TraceStream, checks: Checks) -> Items:
    """Read a `RouteTable`'s file, whose first lines may state the model."""
    head, name = FileHead(stream).text, None
    if match := _MODEL.search(head, 0, head.rfind(b"\n") + 1):
        checks.state(_dimensions(match), f"line {head.count(10, 0, match.start()) + 1}")
        word = re.match(rb"\S+", match[1])
        name = word and word[0].decode(errors="replace")
    yield Origin("route-csv", stream.name, frozenset(), name)
    yield from RouteTable(checks).read(stream)


def route_shape(head: bytes) -> ModelShape | None:
    """Return the shape that the head of a `RouteTable`'s file states, if it does.

    It does in the line for the model, and one for each layer: `# layer=N expert_bytes=N …`. Raises
    TraceError for numbers that no model has, and for a layer that is stated twice, differently.
    """
    model = _MODEL.search(head)
    if model is None:
        return None
    _, expert_count, used = _dimensions(model)
    lengths: dict[int, int] = {}
    for line in _LAYER.finditer(head):
        layer, length = int(line[1]), int(line[2])
        if lengths.setdefault(layer, length) != length:
            problem, texts = "two lengths of an expert", (f"{lengths[layer]:,}", f"{length:,}")
            raise TraceError(problem, place=f"layer {layer}", expected=texts[0], found=texts[1])
    if expert_count is None or not any(lengths.values()):
        return None
    if (
        not 0 < expert_count <= MAX_NUMBER + 1
        or max(lengths) > MAX_NUMBER
        or max(lengths.values()) > _MAX_EXPERT_LENGTH
        or not 0 < (used or 1) <= expert_count
    ):
        dimensions = f"{expert_count:,} experts, {used} used, layers up to {max(lengths):,}"
        dimensions += f", up to {max(lengths.values()):,} bytes"
        raise TraceError("the stated numbers fit no model", found=dimensions)
    return ModelShape(
        tuple(
            FamilyShape(layer, ROUTED_FAMILY, expert_count, length, used)
            for layer, length in sorted(lengths.items())
            if length
        )
    )


def _dimensions(model: re.Match[bytes]) -> Dimensions:
    """Read `n_layer=N n_expert=N n_expert_used=N`, in any order, among other words."""
    words = model[1].decode(errors="replace").split()
    values = dict(word.partition("=")[::2] for word in words)
    texts = (values.get(name, "") for name in ("n_layer", "n_expert", "n_expert_used"))
    return Dimensions(*(int(text) if _NUMBER.fullmatch(text) else None for text in texts))
