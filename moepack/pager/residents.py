"""The experts in memory: a cache decides which, and slots of a pool hold their bytes."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from moepack.caching.cache import Cache, Tally
from moepack.keys import ExpertKey
from moepack.pager.mapped_model import MappedModel, PartSpan, slot_places
from moepack.pager.messages import Do, op
from moepack.pager.prefetcher import Prefetcher
from moepack.pager.slots import SlotPool
from moepack.reading.batch import Batch, ExpertBytes
from moepack.reading.reader import Reader
from moepack.shape import ROUTED_FAMILY


class Residents:
    """Experts in slots of the lengths `rooms`; `spans` are where programs map them.

    What the cache evicts is `aside`, in its slot, until it is released: a program may still compute
    with it. So that reading need not wait for that, `reserve` bytes are kept beside the cache.
    Parts that lie in the files of `model` as in those that are read come into slots without a copy.
    """

    def __init__(
        self,
        reader: Reader,
        spans: Mapping[ExpertKey, tuple[PartSpan, ...]],
        rooms: Mapping[ExpertKey, int],
        cache: Cache,
        reserve: int,
        model: MappedModel,
    ) -> None:
        self._reader = reader
        self._model = model
        self.spans = spans
        self._cache = cache
        self._reserve = reserve
        self._budget = cache.budget
        self._layers_in_place = {
            key.layer for key, parts in spans.items() if not key.expert and model.lies_alike(parts)
        }
        self._rooms = rooms
        self._expert_lengths = {
            key: sum(span.length for span in parts) for key, parts in spans.items()
        }
        self._pool = SlotPool(rooms.values())
        self._taken_length = 0
        self._slots: dict[ExpertKey, int] = {}
        self._slot_counts: Counter[int] = Counter()
        """By their length, how many of these there are."""
        self._aside: dict[ExpertKey, None] = {}
        self._lent = 0
        self._coming: dict[ExpertKey, int] = {}
        """Slots of experts that are being read, and of those that were prefetched."""
        self.prefetcher = Prefetcher(
            reader, rooms, self._allocate, self._receive_prefetched, self._discard
        )
        self.tally = Tally()
        self._received_length = 0
        self.read_seconds = 0.0
        """How long programs waited for what was read."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._slots

    @property
    def pool(self) -> int:
        """The descriptor of the memory that programs map."""
        return self._pool.descriptor

    @property
    def budget(self) -> int:
        """The bytes that the cache may hold, and what prefetching borrows of it."""
        return self._budget

    @property
    def expert_length(self) -> int:
        """The bytes of experts in memory; their slots have whole pages."""
        return sum(self._expert_lengths[key] for key in self._slots)

    @property
    def length(self) -> int:
        """The bytes of all slots: those of experts, and those that are kept for others."""
        return self._taken_length + self._pool.spare_length

    @property
    def read_length(self) -> int:
        """The bytes of what was read, also of what was prefetched in vain."""
        return self._received_length + self.prefetcher.wasted_length

    @property
    def holds_all(self) -> bool:
        """Whether all experts are in memory, and none is evicted whatever is chosen."""
        return self._cache.holds_all and len(self._slots) == len(self.spans)

    @property
    def aside(self) -> tuple[ExpertKey, ...]:
        """Experts that the cache has evicted, and that have their slots yet."""
        return tuple(self._aside)

    def of_file(self, file: int) -> list[ExpertKey]:
        """Return the experts that lie in a file, but for those that are evicted."""
        return [
            key
            for key in self._slots
            if key not in self._aside and any(span.file == file for span in self.spans[key])
        ]

    def look_up(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Count what a layer chose; return what is to be read for it."""
        step = self._cache.step(keys, self.tally)
        self._set_aside(step.given_up)
        for key in step.misses:
            self._aside.pop(key, None)
        self.prefetcher.keep_only(step.misses)
        lacking = [key for key in step.misses if key not in self._slots]
        self._evict_alike(lacking, frozenset(keys))
        return lacking

    def _evict_alike(self, lacking: Sequence[ExpertKey], chosen: Container[ExpertKey]) -> None:
        """Evict experts with slots as long as those that are lacking need, which are used again.

        Slots of other lengths would have to be freed, piece by piece of huge pages. A few of a
        length stay all the same: else threads that nobody announces would wait for one in turn.
        """
        missing = self._missing_slots(lacking)
        for other in self._aside:
            if self._rooms[other] in missing:
                missing[self._rooms[other]] -= 1
        for room, count in missing.items():
            kept = _Others(self._rooms, room, chosen)
            spare = self._slot_counts[room] - 2 * self._reserve // room
            for _ in range(min(count, spare)):
                if (key := self._cache.evict(kept)) is None:
                    break
                self._set_aside([key])

    def _missing_slots(self, keys: Iterable[ExpertKey]) -> dict[int, int]:
        """Return by their length how many slots have to be released for experts."""
        limit = self._budget + self._reserve - self.length
        counts = Counter(self._rooms[key] for key in keys if key not in self._coming)
        return self._pool.missing_counts(counts, limit)

    def count(self, keys: Sequence[ExpertKey]) -> None:
        """Count what a layer chose that was mapped already."""
        self._cache.drop(self.look_up(keys))

    def admit(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Have experts in the cache that nothing chose, where there is room; return those."""
        return [key for key in keys if key not in self._slots and self._cache.admit(key)]

    def favour(self, keys: Iterable[ExpertKey]) -> None:
        """Evict experts last, of these the first ones last, as far as they are in the cache."""
        for key in keys:
            self._cache.favour(key)

    def refresh(self, keys: Iterable[ExpertKey]) -> None:
        """Order experts in the cache as if they had been used now, in turn."""
        self._cache.refresh(keys)

    def has_room(self, keys: Iterable[ExpertKey]) -> bool:
        """Return whether experts can be read before others are released."""
        return not self._missing_slots(keys)

    def resize(self, budget: int) -> None:
        """Have another budget; what is beyond it is aside then."""
        self.prefetcher.keep_only(())
        self._lent = 0
        self._budget = budget
        self._set_aside(self._cache.resize(budget))

    def lend(self, length: int) -> None:
        """Lend so many bytes of those that are free to what is prefetched."""
        self._lent = length

    @property
    def free_length(self) -> int:
        """The bytes of the cache that nothing takes; below 0 where a step takes more."""
        return self._cache.budget - self._cache.held_length - self._lent

    def evictable(self) -> Iterable[ExpertKey]:
        """Return what the cache has and may evict."""
        return self._cache.evictable()

    def is_cached(self, key: ExpertKey) -> bool:
        """Return whether the cache has an expert, which is a hit if it is chosen."""
        return key in self._cache

    def length_of(self, keys: Iterable[ExpertKey]) -> int:
        """Return the bytes of the slots that experts take."""
        return sum(self._rooms[key] for key in keys)

    def set_aside(self, keys: Sequence[ExpertKey]) -> None:
        """Evict experts of the cache."""
        self._cache.drop(keys)
        self._set_aside(keys)

    def _set_aside(self, keys: Iterable[ExpertKey]) -> None:
        self._aside.update((key, None) for key in keys if key in self._slots)

    @contextlib.contextmanager
    def read(self, keys: Sequence[ExpertKey]) -> Iterator[Iterator[ExpertKey]]:
        """Begin to read experts into slots; give an iterator of each that has come.

        Where that fails, none of those that have not come is there. Raises what reading raises.
        """
        started = time.perf_counter()
        coming = dict.fromkeys(keys)
        prefetched = dict.fromkeys(key for key in keys if key in self.prefetcher)
        try:
            with self._demand([key for key in keys if key not in prefetched]) as demanded:
                yield self._completions(prefetched, demanded, coming)
        finally:
            self.read_seconds += time.perf_counter() - started
            if coming:
                self.prefetcher.keep_only(())
                self._cache.drop(coming)

    @contextlib.contextmanager
    def _demand(self, keys: Sequence[ExpertKey]) -> Iterator[Iterator[ExpertKey]]:
        """Begin to read experts into slots, which those that do not come give back at the end."""
        try:
            into = [self._allocate(key) for key in keys]
            is_in_place = None not in into
            buffers = into if is_in_place else None
            with self._reader.submit(keys, family=ROUTED_FAMILY, into=buffers) as batch:
                yield self._received(batch, is_in_place)
        finally:
            self._discard([key for key in keys if key in self._coming])

    def _completions(
        self,
        prefetched: Iterable[ExpertKey],
        demanded: Iterator[ExpertKey],
        coming: dict[ExpertKey, None],
    ) -> Iterator[ExpertKey]:
        for key in self.prefetcher.take(prefetched):
            self._slots[key] = self._coming.pop(key)
            del coming[key]
            yield key
        for key in demanded:
            del coming[key]
            yield key
        failed = list(coming)
        if failed:  # now the error is met, if it is still there
            with self._demand(failed) as demanded:
                for key in demanded:
                    del coming[key]
                    yield key

    def _received(self, batch: Batch, is_in_place: bool) -> Iterator[ExpertKey]:
        for expert in batch.completions():
            key = ExpertKey(expert.layer, expert.expert)
            self._receive(key, expert, is_in_place)
            self._slots[key] = self._coming.pop(key)
            yield key

    def _allocate(self, key: ExpertKey) -> Mapping[str, memoryview] | None:
        """Take a slot; return where its parts are read to, None where they are copied."""
        slot = self._coming[key] = self._pool.take(self._rooms[key])
        self._taken_length += self._rooms[key]
        self._slot_counts[self._rooms[key]] += 1
        self._trim()
        self._model.begin_edges(self.spans[key])
        return self._views(key, slot) if key.layer in self._layers_in_place else None

    def _receive_prefetched(self, key: ExpertKey, expert: ExpertBytes) -> None:
        self._receive(key, expert, key.layer in self._layers_in_place)

    def _receive(self, key: ExpertKey, expert: ExpertBytes, is_in_place: bool) -> None:
        if not is_in_place:
            for part, view in self._views(key, self._coming[key]).items():
                view[:] = expert.part(part)
        expert.release()
        self._received_length += self._expert_lengths[key]

    def _views(self, key: ExpertKey, slot: int) -> dict[str, memoryview]:
        spans = self.spans[key]
        places = slot_places(spans)
        return {
            span.part: self._pool.view[slot + places[span.part] :][: span.length] for span in spans
        }

    def part(self, key: ExpertKey, part: str) -> memoryview:
        """Return the bytes of a part of an expert that is resident."""
        return self._views(key, self._slots[key])[part]

    def mapping(self, key: ExpertKey) -> Iterator[bytes]:
        """Yield what a program is to do to have an expert, the last of which says that it has."""
        slot = self._slots[key]
        places = slot_places(self.spans[key])
        for span in self.spans[key]:
            start, end = span.whole_pages
            if start < end:
                source = slot + places[span.part] + start - span.offset
                place = {"file": span.file, "offset": start, "length": end - start}
                yield op(Do.MAP, source=source, **place)
        yield op(Do.RESIDENT, layer=key.layer, expert=key.expert)

    def release(self, keys: Iterable[ExpertKey]) -> None:
        """Give the slots of experts back, which no program maps any more."""
        for key in keys:
            self._aside.pop(key, None)
            self._give_back(key, self._slots.pop(key))
        self._trim()

    def _discard(self, keys: Iterable[ExpertKey]) -> None:
        """Give the slots of experts back that were being read, or prefetched in vain."""
        for key in keys:
            self._give_back(key, self._coming.pop(key))
        self._trim()

    def _give_back(self, key: ExpertKey, slot: int) -> None:
        room = self._rooms[key]
        self._pool.give_back(slot, room)
        self._taken_length -= room
        self._slot_counts[room] -= 1

    def _trim(self) -> None:
        """Free spare slots beyond the budget: those of lengths that nothing needed."""
        self._pool.trim(self._budget + self._reserve - self._taken_length)

    def close(self) -> None:
        """Free the memory."""
        self.prefetcher.close()
        self._pool.close()


class _Others(Container[ExpertKey]):
    """Experts with slots of other lengths, and those that are chosen."""

    def __init__(
        self, rooms: Mapping[ExpertKey, int], room: int, chosen: Container[ExpertKey]
    ) -> None:
        self._rooms, self._room, self._chosen = rooms, room, chosen

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, ExpertKey)
        return self._rooms[key] != self._room or key in self._chosen
