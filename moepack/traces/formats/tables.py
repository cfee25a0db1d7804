"""Traces as CSV: a line a selection (`route-csv`), or a line a layer of a token (`call-csv`)."""

import re
from collections.abc import Iterator

import numpy as np

from moepack.common.errors import TraceError
from moepack.common.shape import ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.traces.compressed import TraceStream
from moepack.traces.formats.number_text import (
    Assembler,
    Fault,
    FileHead,
    Places,
    Rows,
    Runs,
    Text,
    Truths,
    out_of_bounds,
    report,
    texts,
)
from moepack.traces.model import (
    MAX_NUMBER,
    Bytes,
    Dimensions,
    Ints,
    Items,
    Origin,
    Phase,
    Piece,
    Unknown,
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

    heading: bytes
    expected: str
    column_count: int
    layer_column: int
    token_column: int

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._assembler = Assembler(checks)
        self._calls = Runs()

    def read(self, stream: TraceStream) -> Iterator[Piece]:
        """Read a whole text."""
        for text in texts(stream):
            yield from self._add(text)
        yield from self._assembler.end()

    def _last_experts(self, text: Text, first: Places) -> tuple[Truths, Places]:
        """Return whether lines are rows, by their first numbers, and their last experts."""
        raise NotImplementedError

    def _left_out(self, columns: Ints) -> Truths:
        """Return whether each row is left out."""
        return np.zeros(len(columns), np.bool_)

    def _of_calls(self, columns: Ints) -> tuple[Ints, Bytes, Ints]:
        """Return the request, phase and call of each row."""
        raise NotImplementedError

    def _add(self, text: Text) -> Iterator[Piece]:
        """Read the next text; yield the pieces of the trace that are complete."""
        first = text.rows((b",",) * self.column_count)
        is_row, last = self._last_experts(text, first)
        first = first[is_row]
        counts = last[is_row] - first - self.column_count + 1
        columns = text.columns(first, self.column_count)
        owner = np.repeat(np.arange(len(first)), counts)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        expert = text.values(first[owner] + self.column_count + number)
        is_large = np.any(columns < 0, axis=1)
        is_large[owner[expert < 0]] = True
        report(self._checks, text, self._faults(text, first, first[is_large]))
        kept = ~(is_large | self._left_out(columns))[owner]
        owner, expert = owner[kept], expert[kept]
        layer = columns[owner, self.layer_column]
        right = self._checks.fitting(layer, expert, text.place_of(first[owner]))
        if right is not None:
            owner, expert, layer = owner[right], expert[right], layer[right]
        if not len(owner):
            return
        columns = columns[owner]
        line = text.lines_of(text.starts[first])[owner]
        token = columns[:, self.token_column]
        of_calls = self._of_calls(columns)
        rows = Rows(*of_calls, token, shorts(layer), shorts(expert), line)
        yield from self._assembler.add(rows)

    def _faults(self, text: Text, first: Places, large: Places) -> list[Fault]:
        others = text.other_lines(first)
        others = others[~text.has(others, self.heading)]
        faults = [Fault(at, "not a line of this format", self.expected) for at in others.tolist()]
        return faults + out_of_bounds(text, large, self.expected)


class CallTable(_Table):
    """CSV `decode_call,token_in_call,layer,occurrence,experts`, the experts set apart by spaces.

    Rows of a layer's second router (occurrence 1 and above) are left out and counted.
    """

    heading = CALL_HEADING
    expected = CALL_HEADING.decode()
    column_count = 4
    layer_column = 2
    token_column = 1

    def _last_experts(self, text: Text, first: Places) -> tuple[Truths, Places]:
        last = text.last_of_lines(first)
        follows = text.has(text.ends[:-1], b" ") & (text.starts[1:] - text.ends[:-1] == 1)
        joined = np.cumsum(np.append(False, follows))
        start = first + self.column_count
        is_row = joined[last] - joined[start] == last - start
        return is_row & text.ends_line(text.ends[last]), last

    def _left_out(self, columns: Ints) -> Truths:
        is_other: Truths = columns[:, 3] > 0
        self._checks.warn("rows of a layer's second router", int(np.count_nonzero(is_other)))
        return is_other

    def _of_calls(self, columns: Ints) -> tuple[Ints, Bytes, Ints]:
        zeros = np.zeros(len(columns), np.int64)
        return (
            zeros,
            np.full(len(columns), Phase.UNKNOWN, np.uint8),
            self._calls.numbers(columns[:, 0]),
        )


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
        self._turns = Runs()

    def _add(self, text: Text) -> Iterator[Piece]:
        """Check the model that the text states, then read it."""
        # Looking for lines takes many times as long as looking for bytes.
        for match in _MODEL.finditer(text.data) if b"\n# model=" in text.data else ():
            self._checks.state(_dimensions(match), f"line {text.line_of(match.start())}")
        yield from super()._add(text)

    def _last_experts(self, text: Text, first: Places) -> tuple[Truths, Places]:
        """Take one expert a row; the columns behind it do not matter."""
        last = first + self.column_count
        behind = text.ends[last]
        return (text.bytes[behind] == ord(",")) | text.ends_line(behind), last

    def _of_calls(self, columns: Ints) -> tuple[Ints, Bytes, Ints]:
        """Tell decode steps apart, and prefills by their turn, whose numbers may be any."""
        turn, phase, step = columns[:, :3].T
        phases = np.select([phase == 0, phase == 1], [Phase.PREFILL, Phase.DECODE], Phase.UNKNOWN)
        call = self._calls.numbers(turn, phase, np.where(phase == 0, 0, step))
        return self._turns.numbers(turn), phases.astype(np.uint8), call


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
