"""The routed reads of a model: which experts each token needs in each layer, step by step.

A step is one layer of one token: its experts are known together, and the next step's only when
these have been read. Taken from a trace, or drawn from hotness where there is none.
"""

import csv
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.errors import TraceError

USUAL_EXPERTS_USED = 8


class RoutedStep(NamedTuple):
    """The experts that one token needs in one layer."""

    layer: int
    experts: tuple[int, ...]


class Routing(NamedTuple):
    """Steps in the order in which an engine meets them, and where they came from."""

    steps: list[RoutedStep]
    token_count: int
    origin: str


class _Columns(NamedTuple):
    """What a trace's columns are called: those that tell tokens apart, and those of experts."""

    token: tuple[str, ...]
    experts: str


_FORMATS = (
    _Columns(("decode_call", "token_in_call"), "experts"),
    _Columns(("turn", "phase", "step"), "expert"),
)


def from_trace(path: str, expert_counts: Mapping[int, int], token_count: int) -> Routing:
    """Read the first tokens of a CSV trace that has a heading.

    Two headings are known: `decode_call,token_in_call,layer,occurrence,experts` with several
    experts a line, and `turn,phase,step,layer,slot,expert,…` with one. Raises TraceError for
    another format, and for layers or experts that are not in `expert_counts` (experts by layer).
    """
    tokens: dict[tuple[str, ...], dict[int, dict[int, None]]] = {}
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            for token, layer, experts in _rows(file, path, expert_counts):
                if token not in tokens and len(tokens) >= token_count:
                    continue
                tokens.setdefault(token, {}).setdefault(layer, {}).update(dict.fromkeys(experts))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"cannot read the trace: {error}", path=path) from None
    steps = [
        RoutedStep(layer, tuple(experts))
        for layers in tokens.values()
        for layer, experts in sorted(layers.items())
    ]
    if not steps:
        raise TraceError("no tokens in it", path=path)
    return Routing(steps, len(tokens), f"trace {path}")


def from_counts(
    counts: Mapping[tuple[int, int], int],
    expert_counts: Mapping[int, int],
    experts_used: int,
    token_count: int,
    origin: str,
) -> Routing:
    """Draw tokens: `experts_used` different experts a layer, in proportion to their counts.

    Without any counts all experts are alike. The same arguments give the same routing.
    """
    draw = random.Random(0)
    steps = []
    for _, (layer, count) in itertools.product(range(token_count), expert_counts.items()):
        weights = [counts.get((layer, expert), 0) for expert in range(count)]
        steps.append(RoutedStep(layer, _sample(weights, min(experts_used, count), draw)))
    return Routing(steps, token_count, origin)


def _sample(weights: Sequence[int], count: int, draw: random.Random) -> tuple[int, ...]:
    """Draw without putting back (Efraimidis and Spirakis 2006): the highest random ^ (1/weight).

    What has no weight comes last.
    """
    keys = [(draw.random() ** (1 / weight) if weight else draw.random() - 1) for weight in weights]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:count])


def _rows(
    lines: Iterable[str], path: str, expert_counts: Mapping[int, int]
) -> Iterator[tuple[tuple[str, ...], int, list[int]]]:
    """Yield (token, layer, experts) of each line behind the heading."""
    rows = csv.reader(line for line in lines if not line.startswith("#"))
    heading = next(rows, [])
    columns = next(
        (one for one in _FORMATS if {*one.token, "layer", one.experts} <= {*heading}), None
    )
    if columns is None:
        raise TraceError(
            "not a trace that is known",
            path=path,
            expected=" or ".join(",".join((*one.token, "layer", one.experts)) for one in _FORMATS),
            found=",".join(heading)[:80],
        )
    token_at = [heading.index(name) for name in columns.token]
    layer_at, experts_at = heading.index("layer"), heading.index(columns.experts)
    for number, row in enumerate(rows, 1):
        try:
            layer, experts = int(row[layer_at]), [int(one) for one in row[experts_at].split()]
            token = tuple(row[at] for at in token_at)
        except (IndexError, ValueError):
            raise TraceError("not a line of this trace", path=path, place=f"row {number}") from None
        if any(not 0 <= expert < expert_counts.get(layer, 0) for expert in experts):
            raise TraceError(
                "the pack has no such expert",
                path=path,
                place=f"row {number}",
                found=f"layer {layer} experts {experts}",
                hint="was it taken on another model?",
            )
        yield token, layer, experts
