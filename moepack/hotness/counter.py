"""How often experts were chosen, in all and in two halves, of which one is learned from.

What is learned from a sample has to be measured on another one: an order that fits the very tokens
it was made from always looks good. The halves are the requests of even and of odd number; where
there is but one request, the earlier and the later half of its tokens.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.trace.model import Bytes, Counts, Ints, Item, Origin, Phase, Shorts, Tokens, Unknown

_MOST_STRETCHES = 64


Weighted = NDArray[np.float64]
Truths = NDArray[np.bool_]


class Half(NamedTuple):
    """One half: how many tokens, and `counts` [layers, experts] of their selections."""

    token_count: int
    counts: Ints


class _Stretch(NamedTuple):
    token_count: int
    counts: Weighted


class Tally:
    """Counts the selections of traces as they come by.

    `phases` are those that count; None for all. Tokens whose phase is unknown always do. Selections
    may have a weight; tokens and requests are counted without it.
    """

    def __init__(self, phases: frozenset[Phase] | None = None) -> None:
        self._phases = None if phases is None else phases | {Phase.UNKNOWN}
        self.origins: list[Origin] = []
        self.token_count = 0
        self.request_count = 0
        self.loose_count = 0
        """Selections that came as counts, without their tokens."""
        self._loose = _empty()
        self._by_request: list[Weighted] = [_empty(), _empty()]
        self._request_tokens = [0, 0]
        self._stretches: list[_Stretch] = []
        self._stretch_length = 1
        self._request: tuple[int, int] | None = None
        self._weight = 1.0

    @property
    def counts(self) -> Ints:
        """All selections [layers, experts]."""
        return _whole(self._total())

    @property
    def highest(self) -> float:
        """The highest count there is; beyond 2**53 counts are not exact."""
        return float(self._total().max(initial=0))

    @property
    def selection_count(self) -> int:
        """How many selections there were."""
        return sum(self.counts.ravel().tolist())

    @property
    def unknown(self) -> frozenset[Unknown]:
        """What any of the traces does not tell."""
        return frozenset(word for origin in self.origins for word in origin.unknown)

    @property
    def stated_token_count(self) -> int | None:
        """How many tokens there were, with those that counts state; None if some do not."""
        stated = [one.token_count for one in self.origins if Unknown.TOKENS in one.unknown]
        if any(count is None for count in stated):
            return None
        return self.token_count + sum(count or 0 for count in stated)

    def add(self, item: Item, weight: float = 1.0) -> None:
        """Take the next piece of a trace."""
        self._weight = weight
        if isinstance(item, Origin):
            self.origins.append(item)
        elif isinstance(item, Counts):
            self._add_counts(item)
        else:
            self._add_tokens(item)

    def halves(self) -> tuple[str, Half, Half] | None:
        """Give what divides the halves (`requests` or `time`), and both; None without tokens."""
        if self.loose_count or not self.token_count:
            return None
        if self.request_count > 1:
            pairs = zip(self._request_tokens, self._by_request, strict=True)
            even, odd = (Half(count, _whole(counts)) for count, counts in pairs)
            return "requests", even, odd
        middle = (len(self._stretches) + 1) // 2
        earlier, later = self._stretches[:middle], self._stretches[middle:]
        if not later:
            return None
        sums = (_sum(earlier), _sum(later))
        learned, measured = (Half(one.token_count, _whole(one.counts)) for one in sums)
        return "time", learned, measured

    def _total(self) -> Weighted:
        return _add(_add(*self._by_request), self._loose)

    def _add_counts(self, item: Counts) -> None:
        if self._phases is not None and item.phase not in self._phases:
            return
        self.loose_count += int(item.counts.sum())
        self._loose = _add(self._loose, self._table(item.layer, item.expert, item.counts))

    def _add_tokens(self, tokens: Tokens) -> None:
        wanted = self._wanted(tokens.phase)
        request, lengths = tokens.request[wanted], np.diff(tokens.starts)
        chosen = np.repeat(wanted, lengths)
        layer, expert = tokens.layer[chosen], tokens.expert[chosen]
        parity = np.repeat(self._parities(request), lengths[wanted])
        for number in (0, 1):
            mine = parity == number
            table = self._table(layer[mine], expert[mine])
            self._by_request[number] = _add(self._by_request[number], table)
        self.token_count += len(request)
        if self.request_count <= 1:
            self._add_stretches(lengths[wanted], layer, expert)

    def _wanted(self, phase: Bytes) -> Truths:
        if self._phases is None:
            return np.ones(len(phase), np.bool_)
        return np.isin(phase, [int(one) for one in self._phases])

    def _parities(self, request: Ints) -> Ints:
        """Count requests over all origins; give the number of each token's, modulo two."""
        if not len(request):
            return request
        begins = np.ones(len(request), np.bool_)
        begins[1:] = request[1:] != request[:-1]
        begins[0] = self._request != (len(self.origins), int(request[0]))
        self._request = len(self.origins), int(request[-1])
        numbers = np.cumsum(begins) - 1 + self.request_count
        self.request_count += int(begins.sum())
        parity = numbers % 2
        for number in (0, 1):
            self._request_tokens[number] += int(np.count_nonzero(parity == number))
        return parity

    def _add_stretches(self, lengths: Ints, layer: Shorts, expert: Shorts) -> None:
        """Count stretches of tokens of one length; two become one when there are too many."""
        starts = np.concatenate(([0], np.cumsum(lengths)))
        first = 0
        while first < len(lengths):
            if not self._stretches or self._stretches[-1].token_count == self._stretch_length:
                self._stretches.append(_Stretch(0, _empty()))
            have = self._stretches[-1]
            last = min(len(lengths), first + self._stretch_length - have.token_count)
            chosen = slice(int(starts[first]), int(starts[last]))
            counts = _add(have.counts, self._table(layer[chosen], expert[chosen]))
            self._stretches[-1] = _Stretch(have.token_count + last - first, counts)
            first = last
            if len(self._stretches) > _MOST_STRETCHES:
                pairs = zip(self._stretches[0::2], [*self._stretches[1::2], None], strict=False)
                self._stretches = [one if two is None else _sum([one, two]) for one, two in pairs]
                self._stretch_length *= 2

    def _table(self, layer: Shorts, expert: Shorts, counts: Ints | None = None) -> Weighted:
        """Count selections [layers, experts], with the weight."""
        if not len(layer):
            return _empty()
        height, width = int(layer.max()) + 1, int(expert.max()) + 1
        keys = layer.astype(np.int64) * width + expert
        table = np.bincount(keys, counts, minlength=height * width).astype(np.float64)
        return table.reshape(height, width) * np.float64(self._weight)


def _empty() -> Weighted:
    return np.zeros((0, 0))


def _whole(table: Weighted) -> Ints:
    return np.rint(table).astype(np.int64)


def _add(one: Weighted, two: Weighted) -> Weighted:
    """Add two tables of any shape."""
    if one.shape == two.shape:
        return one + two
    total = np.zeros(np.maximum(one.shape, two.shape))
    total[: one.shape[0], : one.shape[1]] += one
    total[: two.shape[0], : two.shape[1]] += two
    return total


def _sum(stretches: list[_Stretch]) -> _Stretch:
    total = _empty()
    for one in stretches:
        total = _add(total, one.counts)
    return _Stretch(sum(one.token_count for one in stretches), total)
