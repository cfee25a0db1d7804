"""The experts that are in memory: those of a step are brought there before it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moepack.caching.cache import Cache, Tally
from moepack.errors import MachineError, PackError
from moepack.keys import ExpertKey
from moepack.reading.batch import Batch
from moepack.reading.reader import Reader
from moepack.running.expert_memory import ExpertMemory
from moepack.running.places import Places, length_of


@dataclass(slots=True)
class Usage:
    """What steps needed: lookups and missing bytes, and the seconds that they waited for these.

    Of what was missing, `prefetched_count` experts were on their way already, since they had been
    expected; `wasted_length` are the bytes of what was expected and not needed.
    """

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    prefetched_count: int = 0
    wasted_length: int = 0


class _Expected(NamedTuple):
    """Experts of a layer that are being read, though none has chosen them yet."""

    keys: frozenset[ExpertKey]
    batch: Batch | None


_NOTHING = _Expected(frozenset(), None)


class ExpertStore:
    """Holds experts in `memory` at their `places`, as far as `cache` has them.

    With `reserve` bytes more it begins to read what it expects, and keeps pages ready.
    Used by one thread at a time. Its methods raise what reading raises, and OSError.
    """

    def __init__(
        self,
        reader: Reader,
        memory: ExpertMemory,
        places: Mapping[ExpertKey, Places],
        cache: Cache,
        reserve: int = 0,
    ) -> None:
        self._reader = reader
        self._memory = memory
        self._places = places
        self._keys: dict[int, dict[int, ExpertKey]] = {}
        for key in places:
            self._keys.setdefault(key.layer, {})[key.expert] = key
        self._cache = cache
        self._reserve = reserve
        self._expected = _NOTHING
        self.usage = Usage()

    @property
    def held_length(self) -> int:
        """The bytes of the experts that are held."""
        return self._cache.held_length

    @property
    def holds_all(self) -> bool:
        """Whether all experts are held for good: then a step needs no `hold`."""
        return self._cache.holds_all

    def count_hits(self, count: int) -> None:
        """Count the lookups of steps that needed no `hold`."""
        self.usage.tally.hit_count += count

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
                self._bring(step.misses)
                self.usage.seconds += time.perf_counter() - started
        except BaseException as error:
            self._cache.drop(step.misses)
            # What is on its way stays where it is until it has come.
            self._give_back(key for key in step.misses if key not in self._expected.keys)
            if isinstance(error, OSError):
                problem = f"no memory for experts: {error.strerror}"
                raise MachineError(problem, place=f"layer {layer}") from error
            raise

    def expect(self, layer: int, experts: Iterable[int]) -> None:
        """Begin to read what a layer may choose, ahead of `hold` for that layer.

        As much of it as the reserve takes; it is forgotten after that, or with `forget`. Where
        reading cannot begin, nothing is expected.
        """
        self.forget()
        room = self._spare_length()
        keys = [key for expert in experts if (key := self._keys[layer][expert]) not in self._cache]
        while keys and self._length_of(keys) > room:
            keys.pop()
        if not keys:
            return
        try:
            batch = self._submit(keys, room - self._length_of(keys))
        except (MachineError, OSError):
            self._give_back(keys)
        else:
            self._expected = _Expected(frozenset(keys), batch)

    def forget(self) -> None:
        """Expect nothing any more; the pages of what was read in vain are spare.

        Where it is interrupted, the next one goes on with it.
        """
        keys, batch = self._expected
        if batch is not None:
            started = time.perf_counter()
            batch.close()
            self._give_back(keys)
            self.usage.wasted_length += self._length_of(keys)
            self._expected = _NOTHING
            self.usage.seconds += time.perf_counter() - started

    def _bring(self, misses: Sequence[ExpertKey]) -> None:
        """Read what is missing, and wait for what of it is on its way."""
        keys, expected = self._expected
        coming = keys.intersection(misses)
        others = [key for key in misses if key not in coming]
        with self._submit(others, self._spare_length()) as batch:
            if expected is not None and coming:
                came = _wait(expected, coming)
                self._expected = _Expected(keys - came, expected)
                self.usage.prefetched_count += len(came)
                coming -= came
            for _ in batch.completions():
                pass
        if coming:
            self.forget()
            bring(
                self._reader, self._memory, self._places, sorted(coming), None, self._spare_length()
            )

    def _submit(self, keys: Sequence[ExpertKey], spare_length: int) -> Batch:
        return _submit(self._reader, self._memory, self._places, keys, spare_length=spare_length)

    def _spare_length(self) -> int:
        """Return how many bytes of pages may be spare.

        A step that is larger than the cache's budget has the reserve's memory too.
        """
        over = max(0, self._cache.held_length - self._cache.budget)
        return self._reserve - over - self._length_of(self._expected.keys)

    def _length_of(self, keys: Iterable[ExpertKey]) -> int:
        return sum(length_of(self._places[key]) for key in keys)

    def _give_back(self, keys: Iterable[ExpertKey]) -> None:
        for key in keys:
            self._memory.give_back(self._places[key].values())


def bring(
    reader: Reader,
    memory: ExpertMemory,
    places: Mapping[ExpertKey, Places],
    keys: Sequence[ExpertKey],
    family: str | None = None,
    spare_length: int = 0,
) -> None:
    """Read experts to their places in memory, all at once; as many bytes of pages stay spare."""
    with _submit(reader, memory, places, keys, family, spare_length) as batch:
        for _ in batch.completions():
            pass


def _submit(
    reader: Reader,
    memory: ExpertMemory,
    places: Mapping[ExpertKey, Places],
    keys: Sequence[ExpertKey],
    family: str | None = None,
    spare_length: int = 0,
) -> Batch:
    """Begin to read experts; up to `spare_length` bytes of pages stay spare."""
    memory.take((span for key in keys for span in places[key].values()), spare_length)
    into = [{part: memory.view(span) for part, span in places[key].items()} for key in keys]
    return reader.submit(keys, family=family, into=into)


def _wait(batch: Batch, wanted: frozenset[ExpertKey]) -> frozenset[ExpertKey]:
    """Wait until the experts that are wanted have come; return those that did.

    One that cannot be read does not come: whoever needs it reads it again, and meets the error.
    """
    came: set[ExpertKey] = set()
    while not came >= wanted and len(batch):
        try:
            for expert in batch.completions():
                came.add(ExpertKey(expert.layer, expert.expert))
                if came >= wanted:
                    break
        except (MachineError, PackError):
            continue
    return wanted & came
