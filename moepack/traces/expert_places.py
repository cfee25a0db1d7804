"""Places of experts in tables, so that tables grow with the experts that a trace names.

Layers and experts have 16 bits, so a table of all of them would have four billion cells. Experts
get their places by pages when they first occur, and keep them.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import TraceError
from moepack.common.shape import FamilyShape
from moepack.common.sizes import divide_up
from moepack.traces.model import MAX_NUMBER, Ints, Shorts

MAX_PLACES = 1 << 20
"""A million experts: ten times the largest model's. A trace that names more was damaged."""
_PAGE_BITS = 7
PAGE = 1 << _PAGE_BITS
"""Experts get places by the page: few steps for a lookup, and little that stays empty."""
_PAGES_IN_LAYER = (MAX_NUMBER + 1) // PAGE
_NONE = -1


class ExpertPlaces:
    """Numbers experts as they occur: places are below `count`, and never change.

    Layers are numbered too, as rows, in the order of their first occurrence. Raises TraceError for
    a trace, at `path`, that names more experts than any model has.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._layers: list[int] = []
        self._row_of_page: list[int] = []
        self._first_of_page: list[int] = []
        self._row_of_layer = np.full(MAX_NUMBER + 1, _NONE, np.int64)
        # By row and page in it, one after another: the place of the page's first expert.
        self._starts = np.zeros(0, np.int64)
        self.width = 0
        """One more than the highest expert of any layer."""

    @property
    def count(self) -> int:
        """The number of places; some belong to experts that did not occur."""
        return len(self._row_of_page) * PAGE

    def rows(self, layer: Shorts) -> Ints:
        """Return the row of each layer."""
        rows = self._row_of_layer.take(layer)
        if rows.min(initial=0) == _NONE:
            self._add_layers(np.unique(layer[rows == _NONE]).tolist())
            rows = self._row_of_layer.take(layer)
        return rows

    def index_of(self, layer: Shorts, expert: Shorts) -> Ints:
        """Return the place of each expert; new experts get one."""
        pages = self.rows(layer) * _PAGES_IN_LAYER
        pages += expert >> _PAGE_BITS
        places = self._starts.take(pages)
        if places.min(initial=0) == _NONE:
            self._add_pages(np.unique(pages[places == _NONE]).tolist())
            places = self._starts.take(pages)
        places += expert & (PAGE - 1)
        self.width = max(self.width, int(expert.max()) + 1 if len(expert) else 0)
        return places

    def _add_layers(self, layers: list[int]) -> None:
        for layer in layers:
            self._row_of_layer[layer] = len(self._layers)
            self._layers.append(layer)
        if len(self._layers) * PAGE > MAX_PLACES:
            raise self._too_many()
        self._starts = padded(self._starts, len(self._layers) * _PAGES_IN_LAYER, _NONE)

    def _add_pages(self, pages: list[int]) -> None:
        for page in pages:
            self._starts[page] = self.count
            row, page_in_layer = divmod(page, _PAGES_IN_LAYER)
            self._row_of_page.append(row)
            self._first_of_page.append(page_in_layer * PAGE)
        if self.count > MAX_PLACES:
            raise self._too_many()

    def keys(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the layers and experts of places."""
        pages, columns = places >> _PAGE_BITS, places & (PAGE - 1)
        layers, rows, firsts = (
            np.array(numbers, np.int64)
            for numbers in (self._layers, self._row_of_page, self._first_of_page)
        )
        return layers[rows[pages]], firsts[pages] + columns

    def counted(self, counts: Ints) -> tuple[Ints, Ints, Ints]:
        """Return layers, experts and counts, of counts by place: in their order, without zeros."""
        places = np.flatnonzero(counts)
        layers, experts = self.keys(places)
        order = np.lexsort((experts, layers))
        return layers[order], experts[order], counts[places][order]

    def row(self, values: Ints, layer: int, expert_count: int) -> Ints:
        """Return the values of a layer's experts 0 to `expert_count` - 1, from values by place.

        An expert that did not occur has 0.
        """
        result = np.zeros(expert_count, np.int64)
        row = int(self._row_of_layer[layer])
        for page in range(divide_up(expert_count, PAGE) if row != _NONE else 0):
            start, first = int(self._starts[row * _PAGES_IN_LAYER + page]), page * PAGE
            there = values[start : start + min(PAGE, expert_count - first)]
            if start != _NONE:
                result[first : first + len(there)] = there
        return result

    def _too_many(self) -> TraceError:
        problem = "more layers or experts than any model has"
        return TraceError(problem, path=self._path, expected=f"<= {MAX_PLACES:,} experts in all")


class PlaceCounts:
    """Counts of selections by place."""

    def __init__(self) -> None:
        self.values: Ints = np.zeros(0, np.int64)

    def count(self, places: Ints, counts: Ints | None = None) -> None:
        """Count places, each once or `counts` times."""
        if counts is None:
            numbers = np.bincount(places)
        else:  # `np.bincount` would do it in floats, which are exact up to 2^53
            numbers = np.zeros(int(places.max(initial=-1)) + 1, np.int64)
            np.add.at(numbers, places, counts)
        self.add(numbers)

    def add(self, more: Ints) -> None:
        """Add other counts."""
        self.values = padded(self.values, len(more))
        self.values[: len(more)] += more


def lengths_by_layer(routed: Mapping[int, FamilyShape]) -> Ints:
    """Return the bytes of one expert by layer; 0 for a layer without experts."""
    lengths = np.zeros(MAX_NUMBER + 1, np.int64)
    for layer, family in routed.items():
        lengths[layer] = family.expert_length
    return lengths


def values_before(values: Ints, places: Ints, last: Ints) -> Ints:
    """Return for each use the value of its expert's use before.

    `last` has the latest value by place, before these uses; afterwards with them.
    """
    # numpy counts numbers of 16 bits instead of comparing them: five times as fast.
    keys = places.astype(np.uint16) if len(last) <= 1 << 16 else places
    order = np.argsort(keys, kind="stable")
    ordered = values[order]
    before_in_order = np.concatenate((ordered[:1], ordered[:-1]))
    is_first = np.diff(places[order], prepend=-1) != 0
    before_in_order[is_first] = last[places[order[is_first]]]
    last[places[order]] = ordered  # the latest one stays
    before = np.empty_like(before_in_order)
    before[order] = before_in_order
    return before


def padded(values: NDArray[np.int64], count: int, fill: int = 0) -> NDArray[np.int64]:
    """Lengthen values by place to `count` places, of which the new ones have `fill`."""
    more = count - len(values)
    return np.pad(values, (0, more), constant_values=fill) if more > 0 else values
