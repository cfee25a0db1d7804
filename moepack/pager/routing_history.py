"""What routers chose so far: how likely the next step chooses an expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from moepack.keys import ExpertKey

_PRIOR = 16
"""Tokens of a uniform router that each layer begins with."""
_MEMORY = 16384
"""Tokens after which what was counted is worth half."""
_HALVINGS = 20


class RoutingHistory:
    """Counts what routers choose; `expert_counts` says how many experts each layer has."""

    def __init__(self, expert_counts: Mapping[int, int]) -> None:
        self._choices = {layer: [0.0] * count for layer, count in expert_counts.items()}
        self._token_counts = dict.fromkeys(expert_counts, 0.0)
        self._width = 0.0
        """How many experts a token chooses in a layer."""

    def add(self, layer: int, choices: Counter[int], token_count: int) -> None:
        """Count what a step chose: for each expert, how many of its tokens did."""
        self._width = choices.total() / token_count
        counts = self._choices[layer]
        for expert, count in choices.items():
            counts[expert] += count
        self._token_counts[layer] += token_count
        if self._token_counts[layer] > _MEMORY:
            self._token_counts[layer] /= 2
            self._choices[layer] = [count / 2 for count in counts]

    def share(self, key: ExpertKey) -> float:
        """Return which share of a layer's tokens chooses an expert."""
        counts = self._choices[key.layer]
        prior = _PRIOR * self._width / len(counts)
        return (counts[key.expert] + prior) / (self._token_counts[key.layer] + _PRIOR)

    def likelihoods(
        self, layer: int, choices: Counter[int], token_count: int, following: int
    ) -> list[float]:
        """Return for each expert of the `following` layer how likely a step chooses it.

        `choices` are what it chose in `layer`, not yet added. Tokens of one text choose alike: a
        step is worth as many independent ones as explain how many experts it chose there.
        """
        self._width = choices.total() / token_count
        shares = self._shares(layer)
        few, many = 0.0, float(token_count)
        for _ in range(_HALVINGS):
            middle = (few + many) / 2
            if sum(_at_least_once(shares, middle)) < len(choices):
                few = middle
            else:
                many = middle
        return _at_least_once(self._shares(following), many)

    def _shares(self, layer: int) -> list[float]:
        shares = (self.share(ExpertKey(layer, one)) for one in range(len(self._choices[layer])))
        return [min(1.0, share) for share in shares]


def _at_least_once(shares: list[float], token_count: float) -> list[float]:
    return [1 - (1 - share) ** token_count for share in shares]
