"""Counting selections, in all and in two halves, one to learn from and one to measure on.

A ranking has to be measured on another sample: on the very tokens that it was made from it always
looks good. The halves are the earlier and the later half of a trace, since today's ranking is used
tomorrow. Halves of every other request share their topics, and tell by comparison how much changes
over time.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey, ModelShape
from moepack.traces.expert_places import ExpertPlaces
from moepack.traces.hotness.timeline import PlaceCounts, Timeline
from moepack.traces.model import (
    MAX_COUNT,
    MAX_NUMBER,
    Counts,
    Ints,
    Item,
    Origin,
    Phase,
    Unknown,
    split_keys,
)
from moepack.traces.steps import ALL_PHASES, Steps, StepStream

_MAX_EXACT = 1 << 53
"""Floats count exactly up to here."""


class Half(NamedTuple):
    """One half: its tokens, and the `counts` of their selections by place."""

    token_count: int
    counts: Ints


class Halves(NamedTuple):
    """The half to learn from, the other one, and their division: `time` or `requests`."""

    by: str
    learned: Half
    measured: Half


class ChunkCounter:
    """Counts the tokens that use each chunk expert: C of a family serves a group of experts.

    In grovemoe a chunk expert serves G experts of its layer, numbers C * G to C * G + G - 1, and is
    used once by a token routed to any of them. The counts of the experts do not tell how many
    tokens were routed to two of a group, so tokens are counted one by one. `chunk_sizes` are by
    layer the experts that share one; layers without are left out.
    """

    def __init__(self, chunk_sizes: Mapping[int, int]) -> None:
        self._size_of_layer = np.zeros(MAX_NUMBER + 1, np.int64)
        for layer, size in chunk_sizes.items():
            self._size_of_layer[layer] = size
        self._places = ExpertPlaces()
        self._counts = PlaceCounts()

    def add(self, steps: Steps, weight: float) -> None:
        """Count the next tokens of a trace."""
        size = self._size_of_layer[steps.layer]
        has_chunks = size > 0
        token = steps.of_selections(np.arange(steps.token_count))[has_chunks]
        layer = steps.layer[has_chunks].astype(np.int64)
        chunk = steps.expert[has_chunks] // size[has_chunks]
        needed: Ints = np.unique(token << 32 | layer << 16 | chunk)
        self._counts.count(self._places.index_of(*split_keys(needed & 0xFFFFFFFF)), weight)

    def counts(self) -> dict[ExpertKey, int]:
        """Return how many tokens used each, by layer and chunk expert, without zeros."""
        return _by_expert(self._places, self._counts.whole())


class SelectionCounter:
    """Counts the selections of traces as they come.

    `phases` are counted; unknown ones always are. Selections may have a weight; tokens and requests
    are counted without it, by `steps`. Counts are by place in `places`. With the model's `shape`,
    its chunk experts are counted too.
    """

    def __init__(
        self, phases: frozenset[Phase] = ALL_PHASES, shape: ModelShape | None = None
    ) -> None:
        self._phases = phases | {Phase.UNKNOWN}
        self.steps = StepStream(self._phases)
        self.places = ExpertPlaces()
        self.origins: list[Origin] = []
        self.loose_count = 0
        """Selections in counts, without their tokens."""
        self._weighted_count: float = 0
        self._loose = PlaceCounts()
        self._timeline = Timeline()
        self._odd = PlaceCounts()
        """Of the requests of odd number."""
        self._odd_token_count = 0
        chunk_sizes = shape.chunk_sizes if shape else {}
        self._chunks = ChunkCounter(chunk_sizes) if chunk_sizes else None

    @property
    def counts(self) -> Ints:
        """All selections."""
        total = PlaceCounts(self.places.count)
        total.add(self._timeline.total().values)
        total.add(self._loose.values)
        return total.whole()

    @property
    def selection_count(self) -> int:
        """The number of selections."""
        return sum(self.counts.tolist())

    @property
    def stated_token_count(self) -> int | None:
        """The number of tokens, with those behind counts; None if any of these are unknown."""
        numbers = [one.token_count for one in self.origins if Unknown.TOKENS in one.unknown]
        if None in numbers:
            return None
        return self.steps.token_count + sum(number or 0 for number in numbers)

    def add(self, item: Item, weight: float = 1.0) -> None:
        """Count the next piece of a trace.

        Raises TraceError if all counts together are more than a pack can state, or, with fractional
        weights, more than floats count exactly.
        """
        if isinstance(item, Origin):
            self.origins.append(item)
        if isinstance(item, Counts) and item.phase in self._phases:
            count = sum(item.counts.tolist())  # may pass 64 bits
            self.loose_count += count
            self._add_total(count, weight)
            places = self.places.index_of(item.layer, item.expert)
            self._loose.count(places, weight, item.counts)
        steps = self.steps.add(item)
        if steps is not None:
            self._add_steps(steps, weight)

    def halves(self) -> Halves | None:
        """Return the earlier and the later half, near equal, cut between requests if possible.

        None without two tokens.
        """
        halves = None if self.loose_count else self._timeline.halves()
        if halves is None:
            return None
        cut, earlier, later = halves
        rest = self._half(self.steps.token_count - cut, later)
        return Halves("time", self._half(cut, earlier), rest)

    def interleaved(self) -> Halves | None:
        """Return every other request and the rest; None without two known requests."""
        if self.loose_count or self.steps.request_count < 2:
            return None
        even = self._timeline.total()
        even.add(-self._odd.values)
        even_token_count = self.steps.token_count - self._odd_token_count
        odd = self._half(self._odd_token_count, self._odd)
        return Halves("requests", self._half(even_token_count, even), odd)

    def chunk_counts(self) -> dict[ExpertKey, int] | None:
        """Return how many tokens used each chunk expert, by layer and its number.

        None if tokens are unknown, or no model with such experts was given.
        """
        return None if self.loose_count or self._chunks is None else self._chunks.counts()

    def by_expert(self, counts: Ints) -> dict[ExpertKey, int]:
        """Return counts by expert, in the order of layers and experts, without zeros."""
        return _by_expert(self.places, counts)

    def _add_total(self, count: int, weight: float) -> None:
        """Add to the sum of all counts, and check it, so that no count can overflow."""
        is_whole = float(weight).is_integer()
        self._weighted_count += count * (int(weight) if is_whole else weight)
        most = MAX_COUNT if isinstance(self._weighted_count, int) else _MAX_EXACT
        if self._weighted_count > most:
            hint = None if most == MAX_COUNT else "weights that are whole numbers count further"
            problem, expected = "counts that add up to too many", f"<= {most:,} in all"
            total = f"{round(self._weighted_count):,}"
            raise TraceError(problem, expected=expected, found=total, hint=hint)

    def _half(self, token_count: int, counts: PlaceCounts) -> Half:
        everywhere = PlaceCounts(self.places.count)
        everywhere.add(counts.values)
        return Half(token_count, everywhere.whole())

    def _add_steps(self, steps: Steps, weight: float) -> None:
        self._add_total(len(steps.layer), weight)
        places = self.places.index_of(steps.layer, steps.expert)
        self._timeline.add(steps.is_first, steps.starts, places, weight)
        is_odd = steps.request % 2 == 1
        self._odd.count(places[steps.of_selections(is_odd)], weight)
        self._odd_token_count += int(np.count_nonzero(is_odd))
        if self._chunks is not None:
            self._chunks.add(steps, weight)


def _by_expert(places: ExpertPlaces, counts: Ints) -> dict[ExpertKey, int]:
    layers, experts = places.keys(np.flatnonzero(counts))
    order = np.lexsort((experts, layers))
    numbers = counts[counts != 0][order].tolist()
    keys = map(ExpertKey, layers[order].tolist(), experts[order].tolist())
    return dict(zip(keys, numbers, strict=True))
