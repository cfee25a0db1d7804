"""What routers chose, call by call of the model, for who records it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moepack.pager.client import Choice

Batch = Mapping[int, NDArray[np.uint16]]
"""By layer, what each token of a call chose [tokens, experts used].

In the last layer llama.cpp computes only tokens whose output is asked for: of a prompt the last."""


class ChoiceRecord:
    """Keeps choices of one context, of which each call of the model has one for each layer."""

    def __init__(self) -> None:
        self._batches: list[dict[int, NDArray[np.uint16]]] = []
        self._last_layer = -1

    def add(self, choice: Choice) -> None:
        """Take a choice; a layer that is not above the last one begins another call."""
        if choice.layer <= self._last_layer or not self._batches:
            self._batches.append({})
        self._last_layer = choice.layer
        experts = np.array(choice.experts, np.uint16)
        self._batches[-1][choice.layer] = experts.reshape(choice.token_count, -1)

    def take(self) -> list[Batch]:
        """Return what was kept, and keep it no more."""
        batches, self._batches = self._batches, []
        self._last_layer = -1
        return list(batches)
