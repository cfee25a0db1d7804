"""The routed reads of a model: which experts each token needs in each layer, step by step.

A step is one layer of one token: its experts are known together, and the next step's only when
these have been read. Taken from a trace, or drawn from hotness where there is none.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from moepack.errors import TraceError
from moepack.trace.formats import registry
from moepack.trace.model import Tokens
from moepack.trace.validation import Checks, Shape

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


def from_trace(path: str, shape: Shape, token_count: int) -> Routing:
    """Read the first tokens of a trace of any format. `shape` has the experts of each layer.

    Raises what `trace_formats.read` raises, and TraceError for a trace without single tokens.
    """
    steps: list[RoutedStep] = []
    count = 0
    for item in registry.read(path, Checks(path, shape)):
        if not isinstance(item, Tokens):
            continue
        for first, last in itertools.islice(itertools.pairwise(item.starts), token_count - count):
            steps.extend(_steps(item.layer[first:last].tolist(), item.expert[first:last].tolist()))
            count += 1
        if count >= token_count:
            break
    if not steps:
        raise TraceError("no tokens in it", path=path, hint="counts alone are for --hotness")
    return Routing(steps, count, f"trace {path}")


def _steps(layers: list[int], experts: list[int]) -> Iterator[RoutedStep]:
    by_layer: dict[int, dict[int, None]] = {}
    for layer, expert in zip(layers, experts, strict=True):
        by_layer.setdefault(layer, {})[expert] = None
    for layer, chosen in sorted(by_layer.items()):
        yield RoutedStep(layer, tuple(chosen))


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
