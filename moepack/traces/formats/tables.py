"""Traces as CSV: a line a selection (`route-csv`), or a line a layer of a token (`call-csv`)."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from moepack.traces.compressed import TraceStream
from moepack.traces.formats.lines import Assembler, FileHead, Lines, numbers_in
from moepack.traces.model import Ints, Items, Origin, Phase, Unknown
from moepack.traces.validation import Checks

ROUTE_HEADING = b"turn,phase,step,layer,slot,expert"
CALL_HEADING = b"decode_call,token_in_call,layer,occurrence,experts"
_DIGITS = rb"\d{1,18}"
_CALLS = re.compile(rb"(?:%b(?:,%b){4}(?: %b)*+\n)++" % ((_DIGITS,) * 3))
_SELECTIONS = re.compile(rb"(?:%b(?:,%b){5}(?:,[^\n]*)?\n)++" % ((_DIGITS,) * 2))
_FIRST_SIX = re.compile(rb"^\d+(?:,\d+){5}", re.M)
_EXPERTS = re.compile(rb"\bn_expert=(\d{1,9})\b")
_USED = re.compile(rb"\bn_expert_used=(\d{1,9})\b")
_MODEL = re.compile(rb"^# model=([^\n]{0,1024})", re.M)


def read_calls(stream: TraceStream, checks: Checks) -> Items:
    """Read CSV of rows `decode_call,token_in_call,layer,occurrence,experts`.

    The experts are set apart by spaces. Rows of a layer's second router (occurrence 1 and above)
    are left out and counted.
    """
    yield Origin("call-csv", stream.name, frozenset({Unknown.REQUESTS, Unknown.PHASES}))
    assembler = Assembler(checks)
    for rows, lines in _rows(stream, checks, _CALLS, CALL_HEADING):
        used = np.array([row.count(b" ") for row in rows.split(b"\n")[:-1]]) + 1
        numbers = numbers_in(rows).astype(np.int64)
        first = np.cumsum(used + 4) - used  # expert of a row, behind its four other numbers
        call, token, layer, occurrence = (numbers[first - n] for n in (4, 3, 2, 1))
        checks.warn("rows of a layer's second router", int(np.count_nonzero(occurrence)))
        row = np.repeat(np.arange(len(used)), used)
        expert = numbers[np.arange(len(row)) + 4 * (row + 1)]
        is_first = occurrence[row] == 0
        row, expert = row[is_first], expert[is_first]
        heads = np.zeros((len(row), 3), np.int64)
        heads[:, 2] = call[row]
        yield from assembler.add(heads, token[row], layer[row], expert, lines[row])
    yield from assembler.end()


def read_route(stream: TraceStream, checks: Checks) -> Items:
    """Read CSV `turn,phase,step,layer,slot,expert,…` of BigMoeOnEdge, a row a selection.

    A turn is a request; phase 0 is prefill, which is written layer by layer, 1 is decode, others
    are unknown. A line `# model=… n_expert=… n_expert_used=…` ahead of them describes the model.
    """
    head = FileHead(stream).text
    model = _MODEL.search(head, 0, head.rfind(b"\n") + 1)
    origin = Origin("route-csv", stream.name)
    if model is not None:
        name = re.match(rb"\S*", model[1])
        origin = replace(
            origin,
            model=name and name[0].decode(errors="replace"),
            expert_count=_number(_EXPERTS, model[1]),
            experts_used=_number(_USED, model[1]) or None,
        )
        checks.state_origin(origin, f"line {head.count(10, 0, model.start()) + 1}")
    yield origin
    assembler = Assembler(checks)
    for rows, lines in _rows(stream, checks, _SELECTIONS, ROUTE_HEADING):
        numbers = numbers_in(b" ".join(_FIRST_SIX.findall(rows))).astype(np.int64)
        turn, number, step, layer, _, expert = numbers.reshape(-1, 6).T
        phase = np.select([number == 0, number == 1], [Phase.PREFILL, Phase.DECODE], Phase.UNKNOWN)
        heads = np.stack((turn, phase, np.where(number, step, 0)), axis=1)
        yield from assembler.add(heads, step, layer, expert, lines)
    yield from assembler.end()


def _rows(
    stream: TraceStream, checks: Checks, pattern: re.Pattern[bytes], heading: bytes
) -> Iterator[tuple[bytes, Ints]]:
    """Yield rows and their lines; others are faults, but for comments and headings."""
    lines = Lines(stream, checks)

    def check(line: bytes) -> None:
        if line and not line.startswith((b"#", heading)):
            lines.fault("not a line of this format", heading.decode(), line)

    return lines.rows(pattern, check)


def _number(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    match = pattern.search(text)
    return None if match is None else int(match[1])
