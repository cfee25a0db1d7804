"""Convert traces of programs that few people use to moepack's trace file.

python -m contrib.convert_trace FORMAT FILE TARGET [--lenient]

A format is a function that yields the rows of a file, and one line in `FORMATS`. All else, from
packed files to checks of layers and experts, is moepack's. To keep a new format simple, files are
read line by line, at some 10 MB/s.
"""

import argparse
import itertools
import json
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from moepack.common.errors import MoepackError, TraceError
from moepack.traces.compressed import TraceStream
from moepack.traces.file_writer import Writer, check_target
from moepack.traces.formats.assembler import MAX_CALL_SELECTIONS, Assembler, Rows
from moepack.traces.formats.number_text import whole_lines
from moepack.traces.model import (
    MAX_COUNT,
    Dimensions,
    Items,
    Origin,
    Phase,
    Tokens,
    Unknown,
)
from moepack.traces.validation import Checks, shorts

_ROWS_AT_ONCE = 1 << 12
_LENIENT = "`--lenient` leaves out and counts such lines"
_NUMBER = r"\d{1,18}"


class Row(NamedTuple):
    """One layer of a call: the experts of its tokens, of which the first has the number `token`.

    `place` is the row's line, or byte, in the file.
    """

    place: int
    call: int
    layer: int
    experts: list[list[int]]
    token: int = 0
    token_count: int = 1


class Lines:
    """The lines of a file, without empty ones and comments; reports bad ones."""

    def __init__(self, stream: TraceStream, checks: Checks) -> None:
        self._stream = stream
        self.checks = checks
        self.number = 0
        self._line = ""
        self._is_cut = False

    def __iter__(self) -> Iterator[str]:
        for text, is_cut in whole_lines(self._stream):
            lines = text.decode(errors="replace").split("\n")[:-1]
            for index, line in enumerate(lines):
                self.number += 1
                self._line = line.strip(" \t")
                self._is_cut = is_cut and index == len(lines) - 1
                if self._line and not self._line.startswith("#"):
                    yield self._line

    def refuse(self, expected: str) -> None:
        """Report the current line as none of the format."""
        problem = "the last line is cut short" if self._is_cut else "not a line of this format"
        self.checks.fault(
            problem,
            f"line {self.number}",
            expected=expected,
            found=repr(self._line[:100]),
            hint=_LENIENT,
        )

    def state(self, dimensions: Dimensions) -> None:
        """Check all further selections against the model that the current line states."""
        self.checks.state(dimensions, f"line {self.number}")


def moe_flash(lines: Lines) -> Iterator[Row]:
    """Read the log of llama-cpp-moe-flash, which has the first token of each batch alone."""
    manifest = re.compile(r"moe-flash: loaded manifest: \d+ layers, (\d{1,9}) experts/layer")
    experts = rf"{_NUMBER}(?:,{_NUMBER})*"
    row = re.compile(
        rf"moe-flash: layer +({_NUMBER}) topk=\[({experts})\](?: \(({_NUMBER}) tokens\)|$)"
    )
    for line in lines:
        if match := manifest.search(line):
            lines.state(Dimensions(expert_count=int(match[1])))
        elif match := row.search(line):
            first = [int(expert) for expert in match[2].split(",")]
            yield Row(lines.number, 0, int(match[1]), [first], 0, int(match[3] or 1))
        elif "moe-flash: layer " in line:
            lines.refuse("moe-flash: layer L topk=[E,E,…]")


def anemll(lines: Lines) -> Iterator[Row]:
    """Read Anemll's JSON, a line a layer and call."""
    keys = ("layer", "n_expert_used", "n_tokens")
    for columns, experts in _json_rows(lines, keys):
        layer, used, count = columns
        if used * count == len(experts) > 0:
            tokens = [experts[at : at + used] for at in range(0, len(experts), used)]
            yield Row(lines.number, 0, layer, tokens, 0, count)
        else:
            lines.refuse("n_expert_used times n_tokens experts")


def mer(lines: Lines) -> Iterator[Row]:
    """Read MER's JSON, a line a token and layer."""
    for (token, layer), experts in _json_rows(lines, ("token", "layer")):
        yield Row(lines.number, token, layer, [experts])


def _json_rows(lines: Lines, keys: tuple[str, ...]) -> Iterator[tuple[list[int], list[int]]]:
    expected = "{" + ",".join(f'"{key}":…' for key in (*keys, "experts")) + "}"
    for line in lines:
        try:
            row = json.loads(line)
            columns, experts = [row[key] for key in keys], [*row["experts"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            lines.refuse(expected)
            continue
        if all(type(n) is int and 0 <= n < 1 << 31 for n in (*columns, *experts)):
            yield columns, experts
        else:
            lines.refuse(expected)


def colibri_route(lines: Lines) -> Iterator[Row]:
    """Read the route trace of colibri: call, row, layer, and experts with their gates."""
    row = re.compile(rf"({_NUMBER}) ({_NUMBER}) ({_NUMBER})((?: {_NUMBER}:\S+)+)")
    for line in lines:
        if match := row.fullmatch(line):
            experts = [int(pair.partition(":")[0]) for pair in match[4].split()]
            yield Row(lines.number, int(match[1]), int(match[3]), [experts], int(match[2]))
        else:
            lines.refuse("call row layer expert:gate…")


def potatomaxx(lines: Lines) -> Iterator[Row]:
    """Read the trace of potatomaxx: token, layer, experts."""
    row = re.compile(rf"{_NUMBER}(?: {_NUMBER}){{2,}}")
    for line in lines:
        if row.fullmatch(line):
            token, layer, *experts = map(int, line.split(" "))
            yield Row(lines.number, token, layer, [experts])
        else:
            lines.refuse("token layer expert…")


def mblt(stream: TraceStream, checks: Checks) -> Iterator[Row]:
    """Read mbolt's stream of little-endian int32: a header, then layer, k, tokens, experts."""
    head = stream.read_whole(12)
    if len(head) < 12 or not head.startswith(b"MBLT"):
        raise TraceError("not an MBLT stream", path=stream.path, expected="MBLT, version 1")
    version, expert_count = struct.unpack_from("<2i", head, 4)
    if version != 1:
        problem = "an MBLT stream of another version"
        raise TraceError(problem, path=stream.path, expected=1, found=version)
    checks.state(Dimensions(expert_count=expert_count), "byte 8")
    offset = len(head)
    while record := stream.read_whole(12):
        layer, used, count = struct.unpack("<3i", record) if len(record) == 12 else (0, 1, 1)
        if min(used, count) < 1 or used * count > MAX_CALL_SELECTIONS:
            raise TraceError(
                "not a record",
                path=stream.path,
                place=f"byte {offset}",
                expected="layer, experts used, tokens",
                found=f"{layer}, {used}, {count}",
            )
        data = stream.read_whole(4 * used * count)
        if len(data) < 4 * used * count:
            checks.fault("the last record is cut short", f"byte {offset}")
            return
        experts = np.frombuffer(data, "<i4").reshape(count, used).tolist()
        yield Row(offset, 0, layer, experts, 0, count)
        offset += 12 + len(data)


def _tokens(
    rows: Iterator[Row], checks: Checks, unknown: frozenset[Unknown], unit: str
) -> Iterator[Tokens]:
    """Put rows together to tokens.

    A call ends where its number changes. In formats whose calls tell phases it ends where the layer
    does not rise.
    """
    by_layer = Unknown.PHASES not in unknown
    assembler = Assembler(checks, unit)
    before = 1 << 62
    while chunk := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        selections = [
            (number, row.token + token, expert)
            for number, row in enumerate(chunk)
            for token, experts in enumerate(row.experts)
            for expert in experts
        ]
        owner, token, expert = np.array(selections, np.int64).reshape(-1, 3).T
        layer, place = (np.array([row[at] for row in chunk], np.int64)[owner] for at in (2, 0))
        right = checks.fitting(layer, expert, lambda n, at=place: f"{unit} {at[n]}")  # type: ignore[misc]
        if right is not None:
            owner, token, expert, layer, place = (
                column[right] for column in (owner, token, expert, layer, place)
            )
        kept, first = np.unique(owner, return_index=True)
        keys = [chunk[n].layer if by_layer else chunk[n].call for n in kept]
        pairs = zip(keys, [before, *keys], strict=False)
        starts = [one <= other if by_layer else one != other for one, other in pairs]
        begins = np.array(starts, np.bool_)
        before = keys[-1] if keys else before
        calls = [chunk[n] for n in kept[begins]]
        phase = [_phase(row) if by_layer else Phase.UNKNOWN for row in calls]
        yield from assembler.add(
            Rows(
                first[begins],
                np.zeros(len(calls), np.int64),
                np.array(phase, np.uint8),
                shorts(layer),
                shorts(expert),
                place,
                token,
            )
        )
    yield from assembler.end()


def _phase(row: Row) -> Phase:
    return Phase.PREFILL if row.token_count > 1 else Phase.DECODE


def colibri_usage(stream: TraceStream, checks: Checks) -> Items:
    """Read the usage file of colibri: layer, expert, count.

    A line `-1 48 128` says that layers go up to 48 and that each has 128 experts; lines of -2 are
    ignored.
    """
    lines = Lines(stream, checks)
    counts: Counter[tuple[int, int, int]] = Counter()
    for line in lines:
        words = line.split(" ")
        if words[0] == "-1" and len(words) == 3 and all(map(str.isdecimal, words[1:])):
            lines.state(Dimensions(int(words[1]) + 1, int(words[2])))
        elif re.fullmatch(r"\d+ \d+ \d+", line) and int(words[2]) <= MAX_COUNT:
            layer, expert, count = map(int, words)
            counts[min(layer, MAX_COUNT), min(expert, MAX_COUNT), lines.number] = count
        elif words[0] not in ("-1", "-2"):
            lines.refuse("layer expert count")
    expert_count = checks.stated.expert_count if checks.stated else None
    unknown = frozenset({Unknown.REQUESTS, Unknown.PHASES, Unknown.TOKENS})
    yield Origin("colibri-usage", stream.name, unknown, expert_count=expert_count)
    layers, experts, lines_of = np.array(list(counts), np.int64).reshape(-1, 3).T
    numbers = np.array(list(counts.values()), np.int64)
    yield checks.counts(Phase.UNKNOWN, layers, experts, numbers, lambda n: f"line {lines_of[n]}")


def heat(stream: TraceStream, checks: Checks) -> Items:
    """Read mbolt's heat: a JSON object with `layers`, each with `heat`, a count for each expert.

    A layer's number is its `abs_layer` (the block), or else its `layer`.
    """
    document = _parse_heat(stream)
    token_count, used = document["n_decode_tokens"], document["k"]
    checks.state(Dimensions(document["n_layers"], document["n_expert_per_layer"], used), None)
    layers: dict[int, list[int]] = document["heat"]
    for layer, counts in layers.items():
        expected, problem = document["n_expert_per_layer"], ""
        if expected is not None and len(counts) != expected:
            problem = "not a count for each expert"
        if token_count is not None and max(counts, default=0) > token_count:
            problem, expected = "an expert used more often than there are tokens", token_count
        elif token_count and used and sum(counts) > token_count * used:
            problem, expected = "more selections than the tokens make", token_count * used
        if problem:
            place = f"layer {layer}"
            raise TraceError(problem, path=stream.path, place=place, expected=expected)
    expert_counts = {layer: len(counts) for layer, counts in layers.items()}
    checks.expect_experts(expert_counts, None)
    unknown = frozenset({Unknown.TOKENS, Unknown.REQUESTS})
    yield Origin("heat", stream.name, unknown, document["model"], token_count, expert_counts)
    for layer, counts in layers.items():
        of_layer = np.array(counts, np.int64)
        expert = np.flatnonzero(of_layer)
        column, place = np.full(len(expert), layer, np.int64), f"layer {layer}"
        yield checks.counts(Phase.DECODE, column, expert, of_layer[expert], lambda _, at=place: at)  # type: ignore[misc]


def _parse_heat(stream: TraceStream) -> dict[str, Any]:
    """Return the facts of a document, None for missing ones, and `heat` by layer."""
    try:
        document = json.loads(stream.read_whole(1 << 27))
        rows = document.get("profile_rows", {}).get("decode_rows")
        facts = {"n_decode_tokens": rows, "n_layers": None, "n_expert_per_layer": None, "k": None}
        facts |= {key: document[key] for key in facts if key in document}
        if any("abs_layer" in layer for layer in document["layers"]):
            facts["n_layers"] = None  # it counts the others
        layers = {one.get("abs_layer", one.get("layer")): one["heat"] for one in document["layers"]}
        numbers = [number for number in facts.values() if number is not None]
        numbers += [number for layer, counts in layers.items() for number in (layer, *counts)]
        model = document.get("model")
        if layers and all(type(number) is int and 0 <= number <= MAX_COUNT for number in numbers):
            return facts | {"heat": layers, "model": model if isinstance(model, str) else None}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    expected = "an object with layers, each with layer or abs_layer, and heat: whole numbers"
    raise TraceError("not the heat of mbolt", path=stream.path, expected=expected)


_ReadRows = Callable[[Lines], Iterator[Row]]
_NO_BORDERS = frozenset({Unknown.REQUESTS, Unknown.PHASES})
_NO_REQUESTS = frozenset({Unknown.REQUESTS})


def _text(name: str, read: _ReadRows, unknown: frozenset[Unknown]) -> Callable[..., Items]:
    def read_items(stream: TraceStream, checks: Checks) -> Items:
        rows = read(Lines(stream, checks))
        return _with_origin(name, unknown, _tokens(rows, checks, unknown, "line"), stream, checks)

    return read_items


def _read_mblt(stream: TraceStream, checks: Checks) -> Items:
    tokens = _tokens(mblt(stream, checks), checks, _NO_REQUESTS, "byte")
    return _with_origin("mblt", _NO_REQUESTS, tokens, stream, checks)


def _with_origin(
    name: str, unknown: frozenset[Unknown], pieces: Items, stream: TraceStream, checks: Checks
) -> Items:
    """Yield the origin before its pieces, with the number of experts that the first lines state."""
    first = next(pieces, None)
    expert_count = checks.stated.expert_count if checks.stated else None
    yield Origin(name, stream.name, unknown, expert_count=expert_count)
    if first is not None:
        yield first
    yield from pieces


FORMATS: dict[str, Callable[[TraceStream, Checks], Items]] = {
    "moe-flash": _text("moe-flash", moe_flash, _NO_REQUESTS | {Unknown.LATER_TOKENS}),
    "anemll": _text("anemll", anemll, _NO_REQUESTS),
    "mer": _text("mer", mer, _NO_BORDERS),
    "colibri-usage": colibri_usage,
    "colibri-route": _text("colibri-route", colibri_route, _NO_BORDERS),
    "potatomaxx": _text("potatomaxx", potatomaxx, _NO_BORDERS),
    "mblt": _read_mblt,
    "heat": heat,
}


def convert(name: str, path: str, target: str, *, lenient: bool = False) -> Counter[str]:
    """Write the trace file `target`; return how much was left out, by problem.

    Raises TraceError for what is wrong in the file, RequestError if there is a target already.
    """
    check_target(target, append=False, force=False)
    checks = Checks(path, lenient=lenient)
    has_selections = False
    with TraceStream(path) as stream, Writer(target) as writer:
        for item in FORMATS[name](stream, checks):
            has_selections |= not isinstance(item, Origin) and len(item.layer) > 0
            writer.add(item)
        if not has_selections:
            raise TraceError("no selections in it", path=path)
    return checks.warnings


def main(arguments: list[str]) -> int:
    """Convert a file, as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="convert_trace", description="Convert a routing trace.")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("file")
    parser.add_argument("target", help="Trace file to write.")
    parser.add_argument("--lenient", action="store_true", help="Leave out and count bad lines.")
    options = parser.parse_args(arguments)
    try:
        warnings = convert(options.format, options.file, options.target, lenient=options.lenient)
    except MoepackError as error:
        hint = f"hint: {error.hint.replace('lenient=True', '--lenient')}\n" if error.hint else ""
        sys.stderr.write(f"error: {error}\n{hint}")
        return 1
    for problem, count in warnings.items():
        sys.stderr.write(f"left out: {count:,} x {problem}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
