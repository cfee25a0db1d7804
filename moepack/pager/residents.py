"""The experts in memory: a cache decides which, and slots of a pool hold their bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moepack.caching.cache import Cache, Tally
from moepack.keys import ExpertKey
from moepack.pager.mapped_model import PartSpan, slot_places, slot_room
from moepack.pager.messages import Do, op
from moepack.pager.slots import SlotPool
from moepack.reading.reader import Reader

Spans = Mapping[ExpertKey, tuple[PartSpan, ...]]


@dataclass(slots=True)
class Usage:
    """What programs needed so far: lookups, and the seconds that they waited for experts.

    `fault_count` are page faults on experts that nobody had announced.
    """

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    fault_count: int = 0


class Residents:
    """Experts of one family in slots; `spans` are where programs map them.

    An expert that the cache gave up keeps its slot until it is given back: a program may still
    compute with it.
    """

    def __init__(self, reader: Reader, spans: Spans, cache: Cache, family: str | None) -> None:
        self._reader = reader
        self._spans = spans
        self._family = family
        self._cache = cache
        self._rooms = {key: slot_room(parts) for key, parts in spans.items()}
        largest = max(self._rooms.values(), default=0)
        self.pool = SlotPool(self._rooms.values(), spare_limit=8 * largest)
        self._slots: dict[ExpertKey, int] = {}
        self._aside: dict[ExpertKey, None] = {}
        """In slots, and not in the cache."""
        self.usage = Usage()

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._slots

    @property
    def aside(self) -> tuple[ExpertKey, ...]:
        """Experts that the cache has given up, and that have their slots yet."""
        return tuple(self._aside)

    @property
    def held_length(self) -> int:
        """The bytes of the experts that the cache holds."""
        return self._cache.held_length

    def look_up(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Count what a layer chose; return what is to be read.

        What the cache gives up for it is `aside` then.
        """
        step = self._cache.step(keys, self.usage.tally)
        for key in step.given_up:
            if key in self._slots:
                self._aside[key] = None
        for key in step.misses:
            self._aside.pop(key, None)
        return [key for key in step.misses if key not in self._slots]

    def forget(self, keys: Sequence[ExpertKey]) -> None:
        """Take back that experts were looked up which are not there."""
        self._cache.drop(keys)

    def read(self, keys: Sequence[ExpertKey]) -> Iterator[ExpertKey]:
        """Read experts into slots, and yield each when it has come.

        Where that fails, none of those that have not come is there. Raises what reading raises.
        """
        started = time.perf_counter()
        coming = dict.fromkeys(keys)
        for key in keys:
            self._slots[key] = self.pool.take(self._rooms[key])
        try:
            into = [self._views(key) for key in keys]
            with self._reader.submit(keys, family=self._family, into=into) as batch:
                for expert in batch.completions():
                    key = ExpertKey(expert.layer, expert.expert)
                    del coming[key]
                    yield key
        finally:
            self.usage.seconds += time.perf_counter() - started
            if coming:
                self._cache.drop(coming)
                self.release(coming)

    def _views(self, key: ExpertKey) -> dict[str, memoryview]:
        slot, spans = self._slots[key], self._spans[key]
        places = slot_places(spans)
        return {
            span.part: self.pool.view[slot + places[span.part] :][: span.length] for span in spans
        }

    def part(self, key: ExpertKey, part: str) -> memoryview:
        """Return the bytes of a part that is in a slot."""
        return self._views(key)[part]

    def mapping(self, key: ExpertKey) -> Iterator[bytes]:
        """Yield what a program is to do to have an expert, the last of which says that it has."""
        slot = self._slots[key]
        places = slot_places(self._spans[key])
        for span in self._spans[key]:
            start, end = span.whole_pages
            if start < end:
                source = slot + places[span.part] + start - span.offset
                place = {"file": span.file, "offset": start, "length": end - start}
                yield op(Do.MAP, source=source, **place)
        yield op(Do.RESIDENT, layer=key.layer, expert=key.expert)

    def spans(self, keys: Iterable[ExpertKey]) -> Iterator[tuple[ExpertKey, tuple[PartSpan, ...]]]:
        """Yield where experts lie in the files that programs map."""
        for key in keys:
            yield key, self._spans[key]

    def release(self, keys: Iterable[ExpertKey]) -> None:
        """Give the slots of experts back, which no program maps any more."""
        for key in keys:
            self._aside.pop(key, None)
            self.pool.give_back(self._slots.pop(key), self._rooms[key])

    def close(self) -> None:
        """Free the memory."""
        self.pool.close()
