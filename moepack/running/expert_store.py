"""The experts that are in memory: those of a step are brought there before it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moepack.caching.cache import Cache, Tally
from moepack.errors import MachineError
from moepack.keys import ExpertKey
from moepack.reading.reader import Reader
from moepack.running.expert_memory import ExpertMemory
from moepack.running.places import Places


@dataclass(slots=True)
class Usage:
    """What steps needed: lookups and missing bytes, and the seconds that reading these took."""

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0


class ExpertStore:
    """Holds experts in `memory` at their `places`, as far as `cache` has them.

    Used by one thread at a time. Its methods raise what reading raises, and OSError.
    """

    def __init__(
        self,
        reader: Reader,
        memory: ExpertMemory,
        places: Mapping[ExpertKey, Places],
        cache: Cache,
    ) -> None:
        self._reader = reader
        self._memory = memory
        self._places = places
        self._keys: dict[int, dict[int, ExpertKey]] = {}
        for key in places:
            self._keys.setdefault(key.layer, {})[key.expert] = key
        self._cache = cache
        self.usage = Usage()

    @property
    def held_length(self) -> int:
        """The bytes of the experts that are held."""
        return self._cache.held_length

    def hold(self, layer: int, experts: Iterable[int]) -> None:
        """Have what a step of a layer chose in memory; `experts` as often as it was chosen.

        Where that fails, none of what was missing is held.
        """
        try:
            known = self._keys[layer]
            keys = [known[expert] for expert in experts]
        except KeyError:
            problem = "a router chose an expert that is not there"
            raise MachineError(problem, place=f"layer {layer}") from None
        step = self._cache.step(keys, self.usage.tally)
        try:
            self._give_back(step.given_up)
            if step.misses:
                started = time.perf_counter()
                bring(self._reader, self._memory, self._places, step.misses)
                self.usage.seconds += time.perf_counter() - started
        except BaseException:
            self._cache.drop(step.misses)
            self._give_back(step.misses)
            raise
        finally:
            self._memory.release()

    def _give_back(self, keys: Iterable[ExpertKey]) -> None:
        for key in keys:
            self._memory.give_back(self._places[key].values())


def bring(
    reader: Reader,
    memory: ExpertMemory,
    places: Mapping[ExpertKey, Places],
    keys: Sequence[ExpertKey],
    family: str | None = None,
) -> None:
    """Read experts to their places in memory, all of them at once."""
    for key in keys:
        memory.take(places[key].values())
    into = [{part: memory.view(span) for part, span in places[key].items()} for key in keys]
    with reader.submit(keys, family=family, into=into) as batch:
        for _ in batch.completions():
            pass
