"""How often chunk experts were needed: expert C of a chunk family serves a group of experts.

In grovemoe a chunk expert serves G experts of its layer, those numbered C * G to C * G + G - 1, and
is needed once by a token that chose any of them. The counts of the experts do not tell how many
tokens chose two of a group, so tokens have to be looked at one by one.
"""

from collections.abc import Mapping

import numpy as np

from moepack.hotness.timeline import add_counts, count_places, no_counts, whole
from moepack.keys import ExpertKey
from moepack.trace.expert_places import ExpertPlaces
from moepack.trace.model import MAX_NUMBER, Ints, split_keys
from moepack.trace.steps import Steps


class ChunkCounter:
    """Counts the tokens that need each chunk expert.

    `chunk_sizes` is, by layer, how many experts share one; layers without are left out.
    """

    def __init__(self, chunk_sizes: Mapping[int, int]) -> None:
        self._size_of_layer = np.zeros(MAX_NUMBER + 1, np.int64)
        for layer, size in chunk_sizes.items():
            self._size_of_layer[layer] = size
        self._places = ExpertPlaces()
        self._counts = no_counts()

    def add(self, steps: Steps, weight: float) -> None:
        """Count the next tokens of a trace."""
        size = self._size_of_layer[steps.layer]
        has_chunks = size > 0
        token = steps.of_selections(np.arange(steps.token_count))[has_chunks]
        layer = steps.layer[has_chunks].astype(np.int64)
        chunk = steps.expert[has_chunks] // size[has_chunks]
        needed: Ints = np.unique(token << 32 | layer << 16 | chunk)
        places = self._places.of(*split_keys(needed & 0xFFFFFFFF))
        self._counts = add_counts(self._counts, count_places(places, weight))

    def counts(self) -> dict[ExpertKey, int]:
        """Return how many tokens needed each, by layer and chunk expert, without zeros."""
        counts = whole(self._counts)
        met = np.flatnonzero(counts)
        layers, chunks = self._places.keys(met)
        keys = map(ExpertKey, layers.tolist(), chunks.tolist())
        return dict(zip(keys, counts[met].tolist(), strict=True))
