"""What routers chose in one call of a model, as pieces of a trace."""

import numpy as np

from moepack.llama_cpp.decoding import Chosen
from moepack.trace.model import Phase, Tokens


def tokens_of(chosen: Chosen, request: int, phase: Phase) -> Tokens:
    """Return the tokens of a call; `chosen` is by layer, and of as many tokens in each."""
    layer = np.repeat(list(chosen), [choice.column_count for choice in chosen.values()])
    expert = np.concatenate([choice.array() for choice in chosen.values()], axis=1)
    count = len(expert)
    return Tokens(
        np.full(count, request, np.int64),
        np.full(count, phase, np.uint8),
        np.arange(count + 1, dtype=np.int64) * len(layer),
        np.tile(layer.astype(np.uint16), count),
        expert.astype(np.uint16).ravel(),
    )
