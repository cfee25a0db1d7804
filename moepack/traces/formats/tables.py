"""Traces as CSV: a line a selection (`route-csv`), or a line a layer of a token (`call-csv`)."""

import re
from dataclasses import replace

from moepack.traces.compressed import TraceStream
from moepack.traces.formats.lines import Assembler, FileHead, Lines
from moepack.traces.model import Items, Origin, Phase, Unknown
from moepack.traces.validation import Checks

ROUTE_HEADING = b"turn,phase,step,layer,slot,expert,"
CALL_HEADING = b"decode_call,token_in_call,layer,occurrence,experts"
_DIGITS = rb"(\d{1,18})"
_FOUR = b",".join([_DIGITS] * 4)
_CALL = re.compile(_FOUR + rb",(\d{1,18}(?: \d{1,18})*)").fullmatch
_SELECTION = re.compile(_FOUR + rb",\d{1,18}," + _DIGITS + rb"(?:,.*)?").fullmatch
_NO_ROW = "not a line of this format"
_PHASES = {0: Phase.PREFILL, 1: Phase.DECODE}
_EXPERTS = re.compile(rb"\bn_expert=(\d{1,9})\b")
_USED = re.compile(rb"\bn_expert_used=(\d{1,9})\b")
_MODEL = re.compile(rb"^# model=([^\n]{0,1024})", re.M)


def read_calls(stream: TraceStream, checks: Checks) -> Items:
    """Read CSV of rows `decode_call,token_in_call,layer,occurrence,experts`.

    The experts are set apart by spaces. Rows of a layer's second router (occurrence 1 and above)
    are left out and counted.
    """
    yield Origin("call-csv", stream.name, frozenset({Unknown.REQUESTS, Unknown.PHASES}))
    lines, assembler, last_call = Lines(stream, checks), Assembler(checks), -1
    for line in lines:
        row = _CALL(line)
        if row is None:
            if line and not line.startswith((b"#", CALL_HEADING)):
                lines.fault(_NO_ROW, CALL_HEADING.decode())
            continue
        call, token, layer, occurrence = map(int, row.groups()[:4])
        if occurrence:
            checks.warn("rows of a layer's second router", 1)
            continue
        if call != last_call:
            last_call = call
            yield from assembler.begin_call(0, Phase.UNKNOWN)
        for expert in map(int, row[5].split()):
            if checks.fits(layer, expert, lines.number):
                assembler.add(token, layer, expert, lines.number)
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
    lines, assembler, last_call, request = Lines(stream, checks), Assembler(checks), (-1, 0, 0), -1
    for line in lines:
        row = _SELECTION(line)
        if row is None:
            if line and not line.startswith((b"#", ROUTE_HEADING)):
                lines.fault(_NO_ROW, ROUTE_HEADING.decode() + "…")
            continue
        turn, phase, step, layer, expert = map(int, row.groups())
        if not checks.fits(layer, expert, lines.number):
            continue
        call = (turn, phase, step if phase else 0)
        if call != last_call:
            request += turn != last_call[0]
            last_call = call
            yield from assembler.begin_call(request, _PHASES.get(phase, Phase.UNKNOWN))
        assembler.add(step, layer, expert, lines.number)
    yield from assembler.end()


def _number(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    match = pattern.search(text)
    return None if match is None else int(match[1])
