"""Steps of many tokens: they use most experts of a layer, and then none.

Counts of the experts that were routed so far tell which of them the next step likely uses.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping

from moepack.common.shape import ExpertKey
from moepack.running.pager.resident_experts import ResidentExperts

MANY = 64
"""Tokens of a step from which on the next layer is prefetched."""
_MOST_UNUSED = 0.05
"""The share of a layer's prefetched experts that may be unused."""
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


class Prompts:
    """Evicts and prefetches for prompts, and keeps the experts that routers use most often.

    While a layer computes the next one is prefetched in the order of the file, as far as it is
    likely to be used and there is space. One layer follows the other, so the least recently used
    experts come next: those that were used least often are evicted instead. `position` sorts
    experts in the order of their files.
    """

    def __init__(
        self, residents: ResidentExperts, position: Callable[[ExpertKey], tuple[object, ...]]
    ) -> None:
        self._residents = residents
        self._position = position
        counts = Counter(key.layer for key in residents.spans)
        self._layers = sorted(counts)
        self._history = RoutingHistory(counts)

    def begin_step(self, layer: int, counts: Counter[int], token_count: int) -> None:
        """Make space for a layer's experts, before they are looked up."""
        self._residents.prefetch_length = 0
        if token_count < MANY:
            self._history.add(layer, counts, token_count)
        else:
            keys = [ExpertKey(layer, expert) for expert in counts]
            missing = [key for key in keys if key not in self._residents.cache]
            self._make_space(self._residents.length_of(missing), layer, frozenset(keys))

    def _make_space(self, length: int, layer: int, kept: Container[ExpertKey]) -> None:
        """Evict experts until so many bytes are free, those first that are used least often.

        Among those that are used alike, the layers behind `layer` come first: they are computed
        last of all.
        """
        missing_length = length - self._residents.free_length
        if missing_length <= 0:
            return
        index = {one: number for number, one in enumerate(self._layers)}
        evicted: list[ExpertKey] = []

        def value(key: ExpertKey) -> tuple[float, int]:
            return self._history.share(key), (index[layer] - index[key.layer]) % len(index)

        for key in sorted(self._residents.cache.evictable(), key=value):
            if missing_length <= 0:
                break
            if key not in kept:
                evicted.append(key)
                missing_length -= self._residents.length_of([key])
        self._residents.evict(evicted)

    def predict(self, layer: int, counts: Counter[int], token_count: int) -> list[ExpertKey]:
        """Return the missing experts that the next layer likely uses, having made space."""
        routed = frozenset(ExpertKey(layer, expert) for expert in counts)
        likely: list[ExpertKey] = []
        next_layer = next((one for one in self._layers if one > layer), layer)
        if next_layer not in (layer, *self._residents.mtp_layers):
            likelihoods = self._history.likelihoods(layer, counts, token_count, next_layer)
            evictable = set(self._residents.cache.evictable()) - routed
            length = self._residents.free_length + self._residents.length_of(evictable)
            likely = self._likely(next_layer, likelihoods, length)
        self._history.add(layer, counts, token_count)
        length = self._residents.length_of(likely)
        self._make_space(length, layer, routed)
        self._residents.prefetch_length = length
        return sorted(likely, key=self._position)

    def _likely(self, layer: int, likelihoods: list[float], length: int) -> list[ExpertKey]:
        """Return the likeliest missing experts of a layer, up to `length` bytes.

        Only a small share of those that will be used is expected to be read in vain.
        """
        unused = _MOST_UNUSED * sum(likelihoods)
        likely: list[ExpertKey] = []
        for expert in sorted(range(len(likelihoods)), key=lambda one: -likelihoods[one]):
            key = ExpertKey(layer, expert)
            if key in self._residents:
                continue
            unused -= 1 - likelihoods[expert]
            length -= self._residents.length_of([key])
            if unused < 0 or length < 0:
                break
            likely.append(key)
        return likely


def _at_least_once(shares: list[float], token_count: float) -> list[float]:
    return [1 - (1 - share) ** token_count for share in shares]
