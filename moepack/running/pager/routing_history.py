"""Counts of routed experts so far: how likely the next step uses an expert."""

from collections import Counter
from collections.abc import Mapping

from moepack.common.keys import ExpertKey

_PRIOR = 16
"""Tokens of a uniform router that each layer begins with."""
_HALF_LIFE = 16384
"""Tokens after which all counts are halved."""
_HALVINGS = 20


class RoutingHistory:
    """Counts routed experts; `expert_counts` has the number of experts of each layer."""

    def __init__(self, expert_counts: Mapping[int, int]) -> None:
        self._counts = {layer: [0.0] * count for layer, count in expert_counts.items()}
        self._token_counts = dict.fromkeys(expert_counts, 0.0)
        self._width = 0.0
        """The experts that a token uses in a layer."""

    def add(self, layer: int, counts: Counter[int], token_count: int) -> None:
        """Add a step: for each expert, the number of its tokens."""
        self._width = counts.total() / token_count
        totals = self._counts[layer]
        for expert, count in counts.items():
            totals[expert] += count
        self._token_counts[layer] += token_count
        if self._token_counts[layer] > _HALF_LIFE:
            self._token_counts[layer] /= 2
            self._counts[layer] = [count / 2 for count in totals]

    def share(self, key: ExpertKey) -> float:
        """Return the share of a layer's tokens that uses an expert."""
        counts = self._counts[key.layer]
        prior = _PRIOR * self._width / len(counts)
        return (counts[key.expert] + prior) / (self._token_counts[key.layer] + _PRIOR)

    def likelihoods(
        self, layer: int, counts: Counter[int], token_count: int, following: int
    ) -> list[float]:
        """Return for each expert of the `following` layer how likely a step uses it.

        `counts` are those of the step in `layer`, not yet added. Tokens of one text are routed
        alike: a step is worth as many independent ones as explain its number of experts there.
        """
        self._width = counts.total() / token_count
        shares = self._shares(layer)
        few, many = 0.0, float(token_count)
        for _ in range(_HALVINGS):
            middle = (few + many) / 2
            if sum(_at_least_once(shares, middle)) < len(counts):
                few = middle
            else:
                many = middle
        return _at_least_once(self._shares(following), many)

    def _shares(self, layer: int) -> list[float]:
        shares = (self.share(ExpertKey(layer, one)) for one in range(len(self._counts[layer])))
        return [min(1.0, share) for share in shares]


def _at_least_once(shares: list[float], token_count: float) -> list[float]:
    return [1 - (1 - share) ** token_count for share in shares]
