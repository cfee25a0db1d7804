"""The experts in memory: a cache decides which, and slots of a pool hold their bytes."""

import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from moepack.common.shape import ROUTED_FAMILY, ExpertKey
from moepack.pack.reading.batch import Batch, ExpertBytes
from moepack.pack.reading.reader import Reader
from moepack.running.pager.budget import SlotLengths
from moepack.running.pager.mapped_model import MappedModel, Spans, slot_offsets
from moepack.running.pager.messages import Op, encode
from moepack.running.pager.prefetcher import Prefetcher
from moepack.running.pager.slots import SlotPool
from moepack.traces.caching.cache import ExpertCache, Tally


class ResidentExperts:
    """Experts in slots of `lengths` bytes; `spans` are where programs map them.

    Experts that the cache evicts keep their slots until these are released: a program may still
    compute with them. So that reading need not wait for that, `reserve` bytes are kept beside the
    cache. Parts that lie in pages as in their source are read into slots without a copy. Programs
    may never use the experts of `mtp_layers`, those for multi-token prediction.
    """

    def __init__(
        self,
        reader: Reader,
        spans: Mapping[ExpertKey, Spans],
        lengths: SlotLengths,
        cache: ExpertCache,
        reserve: int,
        model: MappedModel,
        mtp_layers: Collection[int] = (),
    ) -> None:
        self._reader = reader
        self.mtp_layers = mtp_layers
        self._model = model
        self.spans = spans
        self.cache = cache
        self._reserve = reserve
        self._layers_in_place = {
            key.layer for key, parts in spans.items() if not key.expert and model.lies_alike(parts)
        }
        self._always_used = {key for key in spans if key.layer not in mtp_layers}
        self._lengths = lengths
        self._expert_lengths = {
            key: sum(span.length for span in parts) for key, parts in spans.items()
        }
        self._pool = SlotPool(lengths.values())
        self._taken_length = 0
        self._slots: dict[ExpertKey, int] = {}
        self._slot_counts: Counter[int] = Counter()
        """The number of slots of each length."""
        self._evicted: dict[ExpertKey, None] = {}
        self.prefetch_length = 0
        """The free bytes of the cache that are lent to prefetching."""
        self._reading: dict[ExpertKey, int] = {}
        """Slots of experts that are being read, or were prefetched."""
        self.prefetcher = Prefetcher(reader, lengths, self._allocate, self._receive, self._discard)
        self.tally = Tally()
        self._received_length = 0
        self.read_seconds = 0.0
        """How long programs waited for reads."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._slots

    @property
    def pool(self) -> int:
        """The descriptor of the memory that programs map."""
        return self._pool.descriptor

    @property
    def expert_length(self) -> int:
        """The bytes of experts in memory; their slots have whole pages."""
        return sum(self._expert_lengths[key] for key in self._slots)

    @property
    def length(self) -> int:
        """The bytes of all slots: those of experts, and spare ones."""
        return self._taken_length + self._pool.spare_length

    @property
    def read_length(self) -> int:
        """The bytes that were read, including those prefetched in vain."""
        return self._received_length + self.prefetcher.wasted_length

    @property
    def holds_all(self) -> bool:
        """Whether all experts are in memory, and none is ever evicted.

        Those for multi-token prediction may be missing: as long as nothing is evicted, one that is
        used is read once.
        """
        is_kept = self.cache.fits_all and not self._evicted
        may_be_all = len(self._slots) >= len(self._always_used)
        return is_kept and may_be_all and self._slots.keys() >= self._always_used

    @property
    def evicted(self) -> tuple[ExpertKey, ...]:
        """Experts that the cache has evicted, and that still have their slots."""
        return tuple(self._evicted)

    @property
    def free_length(self) -> int:
        """The bytes of the cache that nothing takes; below 0 if a step takes more."""
        return self.cache.budget - self.cache.resident_length - self.prefetch_length

    def length_of(self, keys: Iterable[ExpertKey]) -> int:
        """Return the bytes of the slots that experts take."""
        return sum(self._lengths[key] for key in keys)

    def of_file(self, file: int) -> list[ExpertKey]:
        """Return the experts that lie in a file, but for evicted ones."""
        return [
            key
            for key in self._slots
            if key not in self._evicted and any(span.file == file for span in self.spans[key])
        ]

    def look_up(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Count the lookups of a layer; return the experts that have to be read."""
        step = self.cache.step(keys, self.tally)
        self._keep_slots(step.evicted)
        for key in step.misses:
            self._evicted.pop(key, None)
        self.prefetcher.keep_only(step.misses)
        missing = [key for key in step.misses if key not in self._slots]
        self._evict_alike(missing, frozenset(keys))
        return missing

    def _evict_alike(self, missing: Sequence[ExpertKey], routed: Container[ExpertKey]) -> None:
        """Evict experts with slots of the missing lengths, to be used again.

        Slots of other lengths would have to be freed, piece by piece of huge pages. A few of a
        length stay all the same: else threads that nobody announces would wait for one in turn.
        """
        missing_slots = self._missing_slots(missing)
        for other in self._evicted:
            if self._lengths[other] in missing_slots:
                missing_slots[self._lengths[other]] -= 1
        for length, count in missing_slots.items():
            kept = _Others(self._lengths, length, routed)
            spare = self._slot_counts[length] - 2 * self._reserve // length
            for _ in range(min(count, spare)):
                if (key := self.cache.evict(kept)) is None:
                    break
                self._keep_slots([key])

    def _missing_slots(self, keys: Iterable[ExpertKey]) -> dict[int, int]:
        """Return by length the number of slots that have to be released for experts."""
        limit = self.cache.budget + self._reserve - self.length
        counts = Counter(self._lengths[key] for key in keys if key not in self._reading)
        return self._pool.missing_counts(counts, limit)

    def count_mapped(self, keys: Sequence[ExpertKey]) -> None:
        """Count the lookups of a layer with all experts mapped."""
        self.cache.drop(self.look_up(keys))

    def admit(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Admit unused experts to the cache, as far as there is space; return those."""
        return [key for key in keys if key not in self._slots and self.cache.admit(key)]

    def has_space(self, keys: Iterable[ExpertKey]) -> bool:
        """Return whether experts can be read before others are released."""
        return not self._missing_slots(keys)

    def resize(self, budget: int) -> None:
        """Set another budget, and evict the experts beyond it."""
        self.prefetcher.keep_only(())
        self.prefetch_length = 0
        self._keep_slots(self.cache.resize(budget))

    def evict(self, keys: Sequence[ExpertKey]) -> None:
        """Evict experts from the cache; they keep their slots."""
        self.cache.drop(keys)
        self._keep_slots(keys)

    def _keep_slots(self, keys: Iterable[ExpertKey]) -> None:
        self._evicted.update((key, None) for key in keys if key in self._slots)

    @contextmanager
    def read(self, keys: Sequence[ExpertKey]) -> Iterator[Iterator[ExpertKey]]:
        """Begin to read experts into slots; yield an iterator over the complete ones.

        If that fails, the others are not resident. Raises what reading raises.
        """
        started = time.perf_counter()
        pending = dict.fromkeys(keys)
        prefetched = dict.fromkeys(key for key in keys if key in self.prefetcher)
        try:
            with self._demand([key for key in keys if key not in prefetched]) as demanded:
                yield self._completions(prefetched, demanded, pending)
        finally:
            self.read_seconds += time.perf_counter() - started
            if pending:
                self.prefetcher.keep_only(())
                self.cache.drop(pending)

    @contextmanager
    def _demand(self, keys: Sequence[ExpertKey]) -> Iterator[Iterator[ExpertKey]]:
        """Begin to read experts into slots; failed ones give theirs back in the end."""
        try:
            into = [self._allocate(key) for key in keys]
            is_in_place = None not in into
            buffers = into if is_in_place else None
            with self._reader.submit(keys, family=ROUTED_FAMILY, into=buffers) as batch:
                yield self._received(batch, is_in_place)
        finally:
            self._discard([key for key in keys if key in self._reading])

    def _completions(
        self,
        prefetched: Iterable[ExpertKey],
        demanded: Iterator[ExpertKey],
        pending: dict[ExpertKey, None],
    ) -> Iterator[ExpertKey]:
        for key in self.prefetcher.collect(prefetched):
            self._slots[key] = self._reading.pop(key)
            del pending[key]
            yield key
        for key in demanded:
            del pending[key]
            yield key
        failed = list(pending)
        if failed:  # reading them again raises the error, if it is still there
            with self._demand(failed) as demanded:
                for key in demanded:
                    del pending[key]
                    yield key

    def _received(self, batch: Batch, is_in_place: bool) -> Iterator[ExpertKey]:
        for expert in batch.completions():
            key = ExpertKey(expert.layer, expert.expert)
            self._receive(key, expert, is_in_place)
            self._slots[key] = self._reading.pop(key)
            yield key

    def _allocate(self, key: ExpertKey) -> Mapping[str, memoryview] | None:
        """Take a slot; return the buffers that parts are read into, None if they are copied."""
        slot = self._reading[key] = self._pool.allocate(self._lengths[key])
        self._taken_length += self._lengths[key]
        self._slot_counts[self._lengths[key]] += 1
        self._trim()
        self._model.prefetch_edges(self.spans[key])
        return self._views(key, slot) if key.layer in self._layers_in_place else None

    def _receive(
        self, key: ExpertKey, expert: ExpertBytes, is_in_place: bool | None = None
    ) -> None:
        if not (key.layer in self._layers_in_place if is_in_place is None else is_in_place):
            for part, view in self._views(key, self._reading[key]).items():
                view[:] = expert.part(part)
        expert.release()
        self._received_length += self._expert_lengths[key]

    def _views(self, key: ExpertKey, slot: int) -> dict[str, memoryview]:
        spans = self.spans[key]
        offsets = slot_offsets(spans)
        return {
            span.part: self._pool.view[slot + offsets[span.part] :][: span.length] for span in spans
        }

    def part(self, key: ExpertKey, part: str) -> memoryview:
        """Return the bytes of a part of an expert that is resident."""
        return self._views(key, self._slots[key])[part]

    def mapping(self, key: ExpertKey) -> Iterator[bytes]:
        """Yield the operations by which a program maps an expert, and knows that it has."""
        slot = self._slots[key]
        offsets = slot_offsets(self.spans[key])
        for span in self.spans[key]:
            if span.has_pages:
                start, _ = span.whole_pages
                yield span.operation(Op.MAP, slot + offsets[span.part] + start - span.offset)
        yield encode(Op.RESIDENT, layer=key.layer, expert=key.expert)

    def release(self, keys: Iterable[ExpertKey]) -> None:
        """Release the slots of experts that no program maps any more."""
        for key in keys:
            self._evicted.pop(key, None)
            self._release_slot(key, self._slots.pop(key))
        self._trim()

    def _discard(self, keys: Iterable[ExpertKey]) -> None:
        """Release the slots of experts that were being read, or prefetched in vain."""
        for key in keys:
            self._release_slot(key, self._reading.pop(key))
        self._trim()

    def _release_slot(self, key: ExpertKey, slot: int) -> None:
        length = self._lengths[key]
        self._pool.release(slot, length)
        self._taken_length -= length
        self._slot_counts[length] -= 1

    def _trim(self) -> None:
        """Free spare slots beyond the budget: those of lengths that nothing needed."""
        self._pool.trim(self.cache.budget + self._reserve - self._taken_length)

    def close(self) -> None:
        """Free the memory."""
        self.prefetcher.close()
        self._pool.close()


class _Others(Container[ExpertKey]):
    """Experts with slots of other lengths, and the experts of a step."""

    def __init__(self, lengths: SlotLengths, length: int, routed: Container[ExpertKey]) -> None:
        self._lengths, self._length, self._routed = lengths, length, routed

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, ExpertKey)
        return self._lengths[key] != self._length or key in self._routed
