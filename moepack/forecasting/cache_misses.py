"""What the caches of ways of running will miss: in memory, and in VRAM."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.forecasting.misses import (
    Misses,
    WorkingSet,
    by_even_router,
    by_trace,
    by_working_set,
    check_working_set,
)
from moepack.forecasting.ways import Model, Way
from moepack.trace.formats.registry import ReadOptions


class CacheMisses:
    """What caches miss, in memory and in VRAM; budgets of the same layers are simulated at once."""

    def __init__(
        self,
        model: Model,
        traces: Sequence[str],
        working_set: WorkingSet | None,
        micro_batch: int | None,
    ) -> None:
        self._model, self._traces = model, traces
        self._working_set, self._micro_batch = working_set, micro_batch
        self._simulated: dict[tuple[int, ...], dict[int, Misses]] = {}

    def of(self, way: Way, ways: Sequence[Way]) -> tuple[Misses | None, Misses | None]:
        """Return what the cache in memory and that in VRAM miss, None where there is none.

        `ways` are all that are asked for.
        """
        layers = self._layers(way)
        alike = [other for other in ways if self._layers(other) == layers]
        return self._at(way.budget, layers, alike), self._at(way.vram_cache, layers, alike)

    def _layers(self, way: Way) -> tuple[int, ...]:
        return tuple(one.layer for one in self._model.layers if way.keeps_in_memory(one.layer))

    def _at(self, budget: int | None, layers: tuple[int, ...], ways: list[Way]) -> Misses | None:
        model = self._model
        step = model.step_of(layers)
        if budget is None or step is None:
            return None
        shape = model.weights.shape.without_mtp()
        part = shape.of_layers(layers)
        if self._traces:
            if layers not in self._simulated:
                lengths = (length for way in ways for length in (way.budget, way.vram_cache))
                budgets = sorted({length for length in lengths if length is not None})
                options = ReadOptions(shape=shape)
                found = by_trace(self._traces, budgets, options, self._micro_batch, layers)
                self._simulated[layers] = {one.budget: one for one in found}
            return self._simulated[layers][budget]
        if self._working_set is not None:
            check_working_set(shape, self._working_set)
            share = part.routed_count / shape.routed_count
            used, new, window = self._working_set
            return by_working_set(part, step, budget, WorkingSet(used * share, new * share, window))
        return by_even_router(part, step, budget)
