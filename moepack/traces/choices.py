"""The routing of one call of a model, as pieces of a trace."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.traces.model import Phase, Tokens


def tokens_of(layers: Mapping[int, NDArray[Any]], request: int, phase: Phase) -> Iterator[Tokens]:
    """Yield the tokens of a call; `layers` are the selected experts by layer [tokens, experts].

    A layer that computed fewer tokens computed the last ones.
    """
    layers = dict(sorted(layers.items()))
    end = max(map(len, layers.values()))
    starts = sorted({end - len(rows) for rows in layers.values()})
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        yield _tokens_of(
            {
                layer: rows[start - end : stop - end or None]
                for layer, rows in layers.items()
                if end - len(rows) <= start
            },
            request,
            phase,
        )


def _tokens_of(layers: Mapping[int, NDArray[Any]], request: int, phase: Phase) -> Tokens:
    layer = np.repeat(list(layers), [rows.shape[1] for rows in layers.values()])
    expert = np.concatenate(list(layers.values()), axis=1)
    count = len(expert)
    return Tokens(
        np.full(count, request, np.int64),
        np.full(count, phase, np.uint8),
        np.arange(count + 1, dtype=np.int64) * len(layer),
        np.tile(layer.astype(np.uint16), count),
        expert.astype(np.uint16).ravel(),
    )
