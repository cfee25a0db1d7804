"""Heat of mbolt: how often each expert was chosen in decode, as JSON.

It is an object with `layers`, each with `heat`, a list of a count for each expert. A layer's number
is `layer`, or, in the heat of GLM-5.2, whose first blocks have no experts, `abs_layer`: that is the
block, where `moe_order` beside it counts only those with experts (results/colibri-119 and
colibri119/glm_overlay.py of doramirdor/mbolt, e7e9dbf of July 2026). Where both are there, the
block is taken.

The object may say how many experts a layer has (`n_expert_per_layer`), how many a token uses (`k`),
how many layers `layer` counts (`n_layers`), and over how many tokens was counted
(`n_decode_tokens`, or `decode_rows` in `profile_rows`).
"""

from typing import Any, NamedTuple

import numpy as np

from moepack.errors import TraceError
from moepack.trace.compressed import TraceStream
from moepack.trace.model import (
    MAX_COUNT,
    MAX_NUMBER,
    Dimensions,
    Ints,
    Items,
    Origin,
    Phase,
    Unknown,
)
from moepack.trace.validation import Checks

EXAMPLE = "mbolt's heat: layers, each with layer or abs_layer, and heat"
_NUMBERS = ("abs_layer", "layer")


def is_heat(document: Any) -> bool:
    """Say whether JSON is heat."""
    layers = document.get("layers") if isinstance(document, dict) else None
    return (
        isinstance(layers, list)
        and bool(layers)
        and all(isinstance(layer, dict) and "heat" in layer for layer in layers)
        and all(any(name in layer for name in _NUMBERS) for layer in layers)
    )


def read(document: Any, stream: TraceStream, checks: Checks) -> Items:
    """Read heat. Raises TraceError for what is wrong in it, or contradicts what it says."""
    profile, model = document.get("profile_rows"), document.get("model")
    rows = profile.get("decode_rows") if isinstance(profile, dict) else None
    token_count = _count(document.get("n_decode_tokens", rows))
    if token_count is not None and token_count > MAX_COUNT:
        problem, expected = "a token count out of bounds", f"<= {MAX_COUNT}"
        raise TraceError(problem, path=checks.path, expected=expected, found=token_count)
    has_blocks = any("abs_layer" in layer for layer in document["layers"])
    stated = Dimensions(
        None if has_blocks else _count(document.get("n_layers")),
        _count(document.get("n_expert_per_layer")),
        _count(document.get("k")),
    )
    if any(number is not None for number in stated):
        checks.state(stated, None)
    layers = [_layer(entry, stated.expert_count, checks) for entry in document["layers"]]
    expert_counts: dict[int, int] = {}
    for number, counts, _ in layers:
        expert_counts[number] = max(len(counts), expert_counts.get(number, 0))
    checks.expect_experts(expert_counts, None)
    yield Origin(
        "heat",
        stream.name,
        frozenset({Unknown.TOKENS, Unknown.REQUESTS}),
        model if isinstance(model, str) else None,
        token_count,
        expert_counts,
    )
    for number, counts, place in layers:
        if token_count is not None:
            _check_tokens(counts, token_count, stated.experts_used, checks, place)
        expert = np.flatnonzero(counts)
        layer = np.full(len(expert), number, np.int64)
        yield checks.counts(Phase.DECODE, layer, expert, counts[expert], lambda _, at=place: at)  # type: ignore[misc]


class _Layer(NamedTuple):
    """A layer, how often each of its experts was chosen, and its place for messages."""

    number: int
    counts: Ints
    place: str


def _layer(entry: dict[str, Any], expert_count: int | None, checks: Checks) -> _Layer:
    name = next(name for name in _NUMBERS if name in entry)
    place = f"{name} {entry[name]}"
    counts = _heat(entry[name], entry["heat"], checks.path, place)
    if expert_count is not None and len(counts) != expert_count:
        raise _wrong("not a count for each expert", checks, place, expert_count, len(counts))
    return _Layer(entry[name], counts, place)


def _heat(layer: Any, heat: Any, path: str, place: str) -> Ints:
    if type(layer) is not int or not 0 <= layer <= MAX_NUMBER:
        expected = f"0 to {MAX_NUMBER}"
        raise TraceError("not a layer", path=path, place=place, expected=expected)
    if not isinstance(heat, list) or any(type(count) is not int for count in heat):
        expected = "whole numbers"
        raise TraceError("not a list of counts", path=path, place=place, expected=expected)
    wrong = next((count for count in heat if not 0 <= count <= MAX_COUNT), None)
    if wrong is not None:
        expected = f"0 to {MAX_COUNT}"
        raise TraceError(
            "a count out of bounds", path=path, place=place, expected=expected, found=wrong
        )
    return np.array(heat, np.int64)


def _check_tokens(
    counts: Ints, token_count: int, experts_used: int | None, checks: Checks, place: str
) -> None:
    """Refuse more selections than so many tokens make, each of which chooses an expert once."""
    most, total = int(counts.max(initial=0)), sum(counts.tolist())
    if most > token_count:
        problem, expected = "an expert chosen more often than there are tokens", f"<= {token_count}"
        raise _wrong(problem, checks, place, expected, most)
    if experts_used is not None and total > token_count * experts_used:
        problem = "more selections than the tokens make"
        expected = f"<= {experts_used} for each of {token_count} tokens"
        raise _wrong(problem, checks, place, expected, total)


def _wrong(problem: str, checks: Checks, place: str, expected: object, found: int) -> TraceError:
    return TraceError(problem, path=checks.path, place=place, expected=expected, found=found)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
