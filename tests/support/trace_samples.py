"""Traces in every format, written from a plain model of routing, by none of moepack's code.

A trace is a list of requests, a request a list of calls, a call some tokens that are computed at
once, and a token its experts by layer. The tokens of a call have the same layers, and as many
experts in each.
"""

import gzip
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from conformance import make_traces
from moepack.common.errors import TraceError
from moepack.traces.formats import registry
from moepack.traces.model import Counts, Item, Origin, Tokens
from moepack.traces.validation import Checks
from tests.support.gguf_builder import F32, GgufBuilder, TensorSpec
from tests.support.hostile_input import refused_by
from tests.support.shapes import shape_of_counts

UNKNOWN, PREFILL, DECODE = 0, 1, 2

TokenExperts = dict[int, list[int]]
Selections = list[tuple[int, int]]


class Call(NamedTuple):
    """Tokens that a model computes at once."""

    phase: int
    tokens: list[TokenExperts]


Trace = list[list[Call]]


class Seen(NamedTuple):
    """Tokens as (request counted from 0, phase, selections), and counts by phase, layer, expert."""

    tokens: list[tuple[int, int, Selections]]
    counts: Counter[tuple[int, int, int]]


Row = tuple[int, int, Selections]
"""A token: its request, its phase, its selections."""


def tokens_from(rows: Sequence[Row]) -> Tokens:
    """Make the tokens of some rows."""
    pairs = [pair for _, _, selections in rows for pair in selections]
    return Tokens(
        np.array([request for request, _, _ in rows], np.int64),
        np.array([phase for _, phase, _ in rows], np.uint8),
        np.cumsum([0, *(len(selections) for _, _, selections in rows)]),
        np.array([layer for layer, _ in pairs], np.uint16),
        np.array([expert for _, expert in pairs], np.uint16),
    )


def flat(items: Iterable[Item]) -> Seen:
    """Return items as plain values, and check that they are well formed."""
    tokens: list[tuple[int, int, Selections]] = []
    counts: Counter[tuple[int, int, int]] = Counter()
    last = -1
    for item in items:
        if isinstance(item, Tokens):
            assert list(item.starts[[0, -1]]) == [0, len(item.layer)]
            assert len(item.layer) == len(item.expert)
            for n, start in enumerate(item.starts[:-1]):
                end = int(item.starts[n + 1])
                assert start < end, "no token is empty"
                assert item.request[n] >= last, "the request never falls"
                last = int(item.request[n])
                pairs = zip(item.layer[start:end], item.expert[start:end], strict=True)
                tokens.append((last, int(item.phase[n]), [(int(a), int(b)) for a, b in pairs]))
        elif isinstance(item, Counts):
            for layer, expert, count in zip(item.layer, item.expert, item.counts, strict=True):
                assert count >= 0
                counts[int(item.phase), int(layer), int(expert)] += int(count)
    order = {request: n for n, request in enumerate(dict.fromkeys(one[0] for one in tokens))}
    return Seen([(order[request], *rest) for request, *rest in tokens], counts)  # type: ignore[misc]


def read(
    path: Path,
    shape: Mapping[int, int] | None = None,
    lenient: bool = False,
    form: str | None = None,
) -> tuple[list[Origin], Seen, Counter[str]]:
    """Read a file; return its origins, its content, and the warnings."""
    checks = Checks(str(path), None if shape is None else shape_of_counts(shape), lenient)
    items = list(registry.read(str(path), checks, form))
    return [item for item in items if isinstance(item, Origin)], flat(items), checks.warnings


def shape_of(trace: Trace) -> dict[int, int]:
    """Return the model on which a trace can have been taken: as many experts in each layer."""
    layers = {layer for one in seen(trace).tokens for layer, _ in one[2]}
    return dict.fromkeys(sorted(layers), dimensions(trace)[1])


def dimensions(trace: Trace) -> tuple[int, int]:
    """Return how many layers and experts the model has at least."""
    pairs = [pair for one in seen(trace).tokens for pair in one[2]]
    return max(layer for layer, _ in pairs) + 1, max(expert for _, expert in pairs) + 1


def selections(token: TokenExperts) -> Selections:
    """List a token's selections in order."""
    return [(layer, expert) for layer, experts in token.items() for expert in experts]


@st.composite
def traces(draw: st.DrawFn, numbered: bool = True, wide: bool = True) -> Trace:
    """Draw a trace. Where calls are not `numbered`, all have the first and the last layer.

    `wide` ones have any layers and experts of 16 bits.
    """
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    top = draw(st.sampled_from([6, 120, *([65536] if wide else [])]))
    limit = draw(st.sampled_from([6, 300, 1200, *([65536] if wide else [])]))
    layers = sorted(rng.sample(range(top), draw(st.integers(2, 4))))
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        calls = [(PREFILL, rng.randint(1, 4)) for _ in range(draw(st.integers(0, 2)))]
        calls += [(DECODE, 1)] * draw(st.integers(1, 4))
        requests.append([_call(rng, layers, limit, numbered, *call) for call in calls])
    return requests


def _call(
    rng: random.Random, layers: list[int], limit: int, numbered: bool, phase: int, count: int
) -> Call:
    ends = [] if numbered else [layers[0], layers[-1]]
    chosen = sorted({*ends, rng.choice(layers), *(n for n in layers if rng.random() < 0.8)})
    used = {layer: rng.randint(2, 4) for layer in chosen}
    experts = range(limit)
    return Call(phase, [{n: rng.sample(experts, used[n]) for n in chosen} for _ in range(count)])


def packed(data: bytes, packing: str) -> bytes:
    """Compress a file, or not; compressed ones are of two parts, as if appended to."""
    half = len(data) // 2
    packers: dict[str, Callable[[bytes], bytes]]
    packers = {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.compress,
    }
    return b"".join(packers[packing](part) for part in (data[:half], data[half:]))


def seen(
    trace: Trace, requests: bool = True, phase: Callable[[Call], int] = lambda call: call.phase
) -> Seen:
    """Return all tokens, with or without requests, and with their phases."""
    tokens = [
        (number * requests, phase(call), selections(token))
        for number, request in enumerate(trace)
        for call in request
        for token in call.tokens
    ]
    return Seen(tokens, Counter())


def _unnumbered(trace: Trace) -> Seen:
    return seen(trace, False, lambda _: UNKNOWN)


def _of_log(trace: Trace) -> Seen:
    return Seen(seen(only(trace, DECODE)).tokens, counted(only(trace, PREFILL), PREFILL))


def only(trace: Trace, phase: int) -> Trace:
    """Keep the calls of one phase."""
    return [[call for call in request if call.phase == phase] for request in trace]


def counted(trace: Trace, phase: int = UNKNOWN) -> Counter[tuple[int, int, int]]:
    """Count selections as if they were of a phase."""
    return Counter((phase, *pair) for one in seen(trace).tokens for pair in one[2])


def _only_counts(trace: Trace) -> Seen:
    return Seen([], counted(trace))


def _text(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def by_layer(call: Call) -> list[tuple[int, list[list[int]]]]:
    """Return the experts of all tokens by layer."""
    return [(layer, [token[layer] for token in call.tokens]) for layer in call.tokens[0]]


def calls_of(trace: Trace) -> list[Call]:
    """List all calls."""
    return [call for request in trace for call in request]


def tokens_of(trace: Trace) -> list[TokenExperts]:
    """List all tokens."""
    return [token for call in calls_of(trace) for token in call.tokens]


def _log_lines(call: Call) -> list[str]:
    return [f"layer {n} expert {e}" for n, rows in by_layer(call) for row in rows for e in row]


def expert_log(trace: Trace, tokens: bool = True, prompts: bool = True) -> bytes:
    """Write the lines of the printing patch."""
    lines = ["main: model loaded", ""]
    for request in trace:
        if prompts:
            lines += ["---began prompt processing---", "slot update: prompt eval"]
            lines += [line for call in only([request], PREFILL)[0] for line in _log_lines(call)]
            lines += ["srv log: layer 3 of 4, expert 5 is ready", "---ended prompt processing---"]
        for number, call in enumerate(only([request], DECODE)[0]):
            lines += _log_lines(call) + [f"---token {number}---"] * tokens
        lines += ["srv  update_slots: all slots are idle", ""]
    return _text(lines)


def _route_csv(trace: Trace) -> bytes:
    layers, experts = dimensions(trace)
    dimensions_text = f"n_layer={layers} n_expert={experts} n_expert_used=4"
    lines = ["# route_trace v1", f"# model=tiny.gguf arch=qwen3moe {dimensions_text}"]
    lines += ["turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]
    for turn, request in enumerate(trace):
        step = 0
        for call in request:
            phase = 0 if call.phase == PREFILL else 1
            for layer, rows in by_layer(call):
                for n, row in enumerate(rows):
                    key = f"{turn},{phase},{step + n},{layer}"
                    lines += [f"{key},{slot},{e},0.25,1,4096" for slot, e in enumerate(row)]
            step += len(call.tokens)
    return _text(lines)


def _call_csv(trace: Trace) -> bytes:
    lines = ["decode_call,token_in_call,layer,occurrence,experts"]
    for number, call in enumerate(calls_of(trace)):
        for layer, rows in by_layer(call):
            for n, row in enumerate(rows):
                lines.append(f"{number},{n},{layer},0,{' '.join(map(str, row))}")
    return _text(lines)


def _counts_csv(trace: Trace) -> bytes:
    rows = [f"{layer},{expert},{n}" for (_, layer, expert), n in counted(trace).items()]
    return _text([f"# tokens = {len(tokens_of(trace))}", "layer,expert,count", *rows])


def _selections_csv(trace: Trace) -> bytes:
    return _text(f"{layer},{e}" for t in tokens_of(trace) for layer, e in selections(t))


def imatrix(trace: Trace) -> bytes:
    """Write the counts of all selections as `llama-imatrix` does, for every projection."""
    builder = GgufBuilder().put("general.type", "str", "imatrix")
    counts = {layer: np.zeros(dimensions(trace)[1], "<f4") for layer in shape_of(trace)}
    for token in tokens_of(trace):
        for layer, expert in selections(token):
            counts[layer][expert] += 1
    for layer, numbers in counts.items():
        for projection in ("up", "down"):
            name = f"blk.{layer}.ffn_{projection}_exps.weight.counts"
            spec = TensorSpec(name, (1, len(numbers)), F32, numbers.tobytes())
            builder.tensors.append(spec)
    return builder.bytes()


def own(trace: Trace) -> bytes:
    """Write moepack's own file, a record a request."""
    records = [
        make_traces.tokens(*((n, *row[1:]) for row in seen([one]).tokens))
        for n, one in enumerate(trace)
    ]
    return make_traces.file(make_traces.origin(), *records)


class Sample(NamedTuple):
    """A format: its name, its writer, the content that it keeps, and the facts that it lacks.

    Calls that are not `numbered` are told by their layers.
    """

    form: str
    write: Callable[[Trace], bytes]
    keeps: Callable[[Trace], Seen]
    unknown: frozenset[str] = frozenset()
    numbered: bool = True


_UNNUMBERED = frozenset({"requests", "phases"})
_COUNTS = _UNNUMBERED | {"tokens"}

TEXTS: dict[str, Sample] = {
    "log": Sample("expert-log", expert_log, _of_log),
    "log without token lines": Sample(
        "expert-log", lambda trace: expert_log(trace, tokens=False), _of_log, numbered=False),
    "log without prompts": Sample(
        "expert-log", lambda trace: expert_log(only(trace, DECODE), prompts=False),
        lambda trace: _unnumbered(only(trace, DECODE)), _UNNUMBERED),
    "route-csv": Sample("route-csv", _route_csv, seen),
    "call-csv": Sample("call-csv", _call_csv, _unnumbered, _UNNUMBERED),
    "counts": Sample("counts", _counts_csv, _only_counts, _COUNTS),
    "selections": Sample("counts", _selections_csv, _only_counts, _COUNTS),
}  # fmt: skip


FEW = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
BINARY = {
    "moepack": Sample("moepack", own, seen),
    "imatrix": Sample(
        "imatrix", imatrix, lambda trace: Seen([], counted(trace, PREFILL)),
        frozenset({"requests", "tokens"})),
}  # fmt: skip
ALL = TEXTS | BINARY
PACKINGS = ("", ".gz", ".zst")
SMALL: Trace = [
    [Call(PREFILL, [{3: [7, 1], 5: [2, 0, 4]}, {3: [300, 1], 5: [1, 2, 3]}]),
     Call(DECODE, [{3: [5, 6], 4: [8], 5: [1]}])],
    [Call(DECODE, [{3: [1, 1023], 5: [10, 11]}]), Call(DECODE, [{3: [2], 5: [3]}])],
]  # fmt: skip


@contextmanager
def pieces_of(length: int) -> Iterator[None]:
    """Let files be read in tiny pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moepack.traces.formats.lines.PIECE_LENGTH", length)
        patch.setattr("moepack.traces.formats.lines._HEAD_LENGTH", 1 << 12)
        patch.setattr("moepack.traces.formats.logs._ENOUGH_SELECTIONS", length // 20)
        yield


def refused(path: Path, **options: Any) -> TraceError:
    """Read a trace that cannot be read; return the error."""
    return refused_by(TraceError, path, lambda: read(path, **options))
