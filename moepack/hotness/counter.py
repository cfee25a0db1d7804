"""How often experts were chosen, in all and in two halves, of which one is learned from.

What is learned from a sample has to be measured on another one: an order that fits the very tokens
it was made from always looks good. The halves are the earlier and the later half of a trace, since
what is learned today is used tomorrow. Neighbours are more alike than that: halves of every other
request share what they are about, and tell by comparison how much changes over time.
"""

from typing import NamedTuple

import numpy as np

from moepack.errors import TraceError
from moepack.hotness.chunks import ChunkCounter
from moepack.hotness.timeline import (
    Timeline,
    Weighted,
    add_counts,
    count_places,
    no_counts,
    whole,
)
from moepack.keys import ExpertKey
from moepack.shape import ModelShape
from moepack.trace.expert_places import ExpertPlaces
from moepack.trace.model import MAX_COUNT, Counts, Ints, Item, Origin, Phase, Unknown
from moepack.trace.steps import ALL_PHASES, Steps, StepStream

_MAX_EXACT = 1 << 53
"""Floats count exactly up to here."""


class Half(NamedTuple):
    """One half: how many tokens, and `counts` of their selections, by place."""

    token_count: int
    counts: Ints


class Halves(NamedTuple):
    """What divides the tokens (`time` or `requests`), the half to learn from, and the other."""

    by: str
    learned: Half
    measured: Half


class SelectionCounter:
    """Counts the selections of traces as they come by.

    `phases` are those that count; those that are unknown always do. Selections may have a weight;
    tokens and requests are counted without it. Counts are by place: `places` says of which expert.
    With the model's `shape`, its chunk experts are counted too.
    """

    def __init__(
        self, phases: frozenset[Phase] = ALL_PHASES, shape: ModelShape | None = None
    ) -> None:
        self._phases = phases | {Phase.UNKNOWN}
        self._steps = StepStream(self._phases)
        self.places = ExpertPlaces()
        self.origins: list[Origin] = []
        self.loose_count = 0
        """Selections that came as counts, without their tokens."""
        self._weighted_count: float = 0
        self._loose = no_counts()
        self._timeline = Timeline()
        self._odd = no_counts()
        """Of the requests of odd number."""
        self._odd_token_count = 0
        chunk_sizes = shape.chunk_sizes if shape else {}
        self._chunks = ChunkCounter(chunk_sizes) if chunk_sizes else None

    @property
    def token_count(self) -> int:
        """How many tokens there were, without those behind counts."""
        return self._steps.token_count

    @property
    def request_count(self) -> int:
        """How many requests these were of."""
        return self._steps.request_count

    @property
    def counts(self) -> Ints:
        """All selections."""
        return whole(self._total())

    @property
    def selection_count(self) -> int:
        """How many selections there were."""
        return sum(self.counts.tolist())

    @property
    def unknown(self) -> frozenset[Unknown]:
        """What any of the traces does not tell."""
        return frozenset(word for origin in self.origins for word in origin.unknown)

    @property
    def stated_token_count(self) -> int | None:
        """How many tokens there were, with those that counts state; None if some do not."""
        stated = [origin.token_count for origin in self.origins if Unknown.TOKENS in origin.unknown]
        if any(count is None for count in stated):
            return None
        return self.token_count + sum(count or 0 for count in stated)

    def add(self, item: Item, weight: float = 1.0) -> None:
        """Count the next piece of a trace.

        Raises TraceError where all counts together are more than a pack can state, or, with
        weights that are no whole numbers, more than floats count exactly.
        """
        if isinstance(item, Origin):
            self.origins.append(item)
        if isinstance(item, Counts) and item.phase in self._phases:
            count = sum(item.counts.tolist())  # may pass 64 bits
            self.loose_count += count
            self._add_total(count, weight)
            places = self.places.of(item.layer, item.expert)
            self._loose = add_counts(self._loose, count_places(places, weight, item.counts))
        steps = self._steps.take(item)
        if steps is not None:
            self._add_steps(steps, weight)

    def halves(self) -> Halves | None:
        """Return the earlier and the later half, near equal, cut between requests where possible.

        None where no tokens are known, or but one.
        """
        halves = None if self.loose_count else self._timeline.halves()
        return halves and Halves("time", *(self._half(*half) for half in halves))

    def interleaved(self) -> Halves | None:
        """Return every other request and the rest; None where there are not two that are known."""
        if self.loose_count or self.request_count < 2:
            return None
        even = add_counts(self._timeline.total(), -self._odd)
        even_token_count = self.token_count - self._odd_token_count
        odd = self._half(self._odd_token_count, self._odd)
        return Halves("requests", self._half(even_token_count, even), odd)

    def chunk_counts(self) -> dict[ExpertKey, int] | None:
        """Return how many tokens needed each chunk expert, by layer and its number.

        None where not all tokens are known, or no model has said that it has such experts.
        """
        return None if self.loose_count or self._chunks is None else self._chunks.counts()

    def by_expert(self, counts: Ints) -> dict[ExpertKey, int]:
        """Return counts by expert, in the order of layers and experts, without zeros."""
        layers, experts = self.places.keys(np.flatnonzero(counts))
        order = np.lexsort((experts, layers))
        numbers = counts[counts != 0][order].tolist()
        keys = map(ExpertKey, layers[order].tolist(), experts[order].tolist())
        return dict(zip(keys, numbers, strict=True))

    def _add_total(self, count: int, weight: float) -> None:
        """Add to the sum of all counts, so that none of them can overflow."""
        is_whole = float(weight).is_integer()
        self._weighted_count += count * (int(weight) if is_whole else weight)
        most = MAX_COUNT if isinstance(self._weighted_count, int) else _MAX_EXACT
        if self._weighted_count > most:
            hint = None if most == MAX_COUNT else "weights that are whole numbers count further"
            expected, found = f"<= {most:,} in all", f"{round(self._weighted_count):,}"
            raise TraceError(
                "counts that add up to too many", expected=expected, found=found, hint=hint
            )

    def _total(self) -> Weighted:
        everywhere = no_counts(self.places.count)
        return add_counts(add_counts(everywhere, self._timeline.total()), self._loose)

    def _half(self, token_count: int, counts: Weighted) -> Half:
        return Half(token_count, whole(add_counts(no_counts(self.places.count), counts)))

    def _add_steps(self, steps: Steps, weight: float) -> None:
        self._add_total(len(steps.layer), weight)
        places = self.places.of(steps.layer, steps.expert)
        self._timeline.add(steps.is_first, steps.starts, places, weight)
        is_odd = steps.request % 2 == 1
        of_odd = places[steps.of_selections(is_odd)]
        self._odd = add_counts(self._odd, count_places(of_odd, weight))
        self._odd_token_count += int(np.count_nonzero(is_odd))
        if self._chunks is not None:
            self._chunks.add(steps, weight)
