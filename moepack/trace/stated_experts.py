"""How many experts the layers of a model have, as a model or the origins of a trace tell."""

from collections.abc import Mapping

import numpy as np

from moepack.errors import TraceError
from moepack.trace.model import Ints, Origin


class StatedExperts:
    """Takes the origins of all files of a trace, which are of one model.

    `expert_counts` are the model's own, by layer; then nothing else counts.
    """

    def __init__(self, expert_counts: Mapping[int, int] | None = None) -> None:
        self._is_model = expert_counts is not None
        self._by_layer = dict(expert_counts or {})
        self._each: int | None = None
        """The experts of each layer that has any."""

    @property
    def are_known(self) -> bool:
        """Whether a model or an origin told how many there are."""
        return self._is_model or bool(self._by_layer) or self._each is not None

    def add(self, origin: Origin) -> None:
        """Take the next origin. Raises TraceError where it tells something else than those before.

        Its path is left to whoever reads the file.
        """
        if self._is_model:
            return
        for layer, count in (origin.expert_counts or {}).items():
            _expect(self._by_layer.setdefault(layer, count), count, f"layer {layer}")
        each = self._each = self._each or origin.expert_count
        if each is not None:
            _expect(each, origin.expert_count or each, None)
            _expect(max(self._by_layer.values(), default=each), each, None)

    def by_layer(self, layer: Ints, expert: Ints) -> dict[int, int]:
        """Return how many experts each layer has, those that were met included.

        `layer` and `expert` [experts] are all that were chosen. Where nothing is known, each layer
        has one more than the highest of all. Raises TraceError for one that cannot be.
        """
        if self._is_model or not len(layer):
            return dict(self._by_layer)
        most = self._each or max(self._by_layer.values(), default=int(expert.max()) + 1)
        counts = dict.fromkeys(np.unique(layer).tolist(), most) | self._by_layer
        bounds = np.array([counts[number] for number in layer.tolist()])
        if np.any(wrong := expert >= bounds):
            first = int(np.argmax(wrong))
            expected = f"experts below {bounds[first]}"
            raise _different(f"layer {layer[first]}", expected, f"expert {expert[first]}")
        return counts


def _expect(expected: int, found: int, place: str | None) -> None:
    if found != expected:
        raise _different(place, f"{expected} experts", str(found))


def _different(place: str | None, expected: str, found: str) -> TraceError:
    hint = "only traces of one model can be judged together"
    return TraceError(
        "traces of different models", place=place, expected=expected, found=found, hint=hint
    )
