"""The speed of a pack in a store: experts by one request each, and by one for each of their parts.

Both read the same experts, through the same reader, with as many requests in flight.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moepack.bench.measuring import Clock, Spread, in_turns, spread
from moepack.common.errors import RequestError
from moepack.common.keys import ExpertKey
from moepack.common.paths import AnyPath
from moepack.common.phases import Progress
from moepack.common.remote_path import is_remote
from moepack.common.sizes import as_list
from moepack.pack.format.names import short_name
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.reader import Reader

MAX_DEPTH = 64
"""The reader's threads."""
_ROUNDS = 4
_SECONDS = 20.0
_PART_COUNT = 20


@dataclass(frozen=True, slots=True)
class StoreReads:
    """Experts read with `depth` requests in flight, by `unit`: `expert` or `part` is a request.

    Speeds are the medians of the rounds, and their extremes.
    """

    unit: str
    depth: int
    experts_per_second: float
    experts_per_second_lowest: float
    experts_per_second_highest: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class StoreGain:
    """How many times as many experts come by one request each as by one for each of their parts.

    `ratio` is the median of the rounds, `low` and `high` are their extremes.
    """

    depth: int
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class StoreReport:
    """All measurements of a store. Lengths are bytes, those of experts are averages.

    `part_seconds` is the median time of a request for one part, with none beside it.
    """

    pack: str
    expert_length: float
    parts_per_expert: float
    part_seconds: float
    readings: tuple[StoreReads, ...]
    gains: tuple[StoreGain, ...]
    round_count: int
    seconds: float


def bench_store(
    address: AnyPath,
    *,
    depths: int | Sequence[int] = (1, 8, 32),
    seconds: float = _SECONDS,
    seed: int = 0,
    progress: Progress | None = None,
) -> StoreReport:
    """Measure how fast experts of the pack at `address` are read, in about `seconds`.

    `depths` are requests in flight. The experts are drawn uniformly by `seed`. `progress` is called
    with the milliseconds done since its last call, and with those of all. Raises RequestError for a
    pack on this machine and for depths out of bounds, and what opening and reading raise.
    """
    chosen = sorted(set(as_list(depths)))
    if not is_remote(address):
        raise RequestError("a pack on this machine", path=address, hint="use `bench_pack`")
    if not chosen or not all(1 <= depth <= MAX_DEPTH for depth in chosen):
        raise RequestError(
            "not a list of depths",
            expected=f"numbers from 1 to {MAX_DEPTH}",
            found=",".join(map(str, chosen)),
        )
    began = time.perf_counter()
    with Pack(address) as pack, pack.reader(depth=max(chosen)) as reader:
        keys = [
            ExpertKey(layer, expert)
            for layer, family in pack.shape.routed.items()
            for expert in range(family.expert_count)
        ]
        random.Random(seed).shuffle(keys)
        store = _Store(pack, reader, keys)
        each = seconds / (2 * len(chosen) * _ROUNDS)
        sides = {
            (unit, depth): _side(store, unit, depth, each, seconds, progress)
            for depth in chosen
            for unit in ("expert", "part")
        }
        part = spread([store.part_seconds() for _ in range(_PART_COUNT)])
        speeds = in_turns(sides, _ROUNDS)
    return StoreReport(
        pack=str(pack.path),
        expert_length=store.expert_length,
        parts_per_expert=store.parts_per_expert,
        part_seconds=part.median,
        readings=tuple(
            _reads(unit, depth, spread(speeds[unit, depth]), store.expert_length)
            for unit, depth in sides
        ),
        gains=tuple(
            _gain(depth, speeds["expert", depth], speeds["part", depth]) for depth in chosen
        ),
        round_count=_ROUNDS,
        seconds=time.perf_counter() - began,
    )


def _reads(unit: str, depth: int, speed: Spread, expert_length: float) -> StoreReads:
    return StoreReads(
        unit, depth, speed.median, speed.lowest, speed.highest, speed.median * expert_length
    )


def _gain(depth: int, experts: Sequence[float], parts: Sequence[float]) -> StoreGain:
    ratios = spread([expert / part for expert, part in zip(experts, parts, strict=True)])
    return StoreGain(depth, ratios.median, ratios.lowest, ratios.highest)


def _side(
    store: "_Store", unit: str, depth: int, seconds: float, total: float, progress: Progress | None
) -> Callable[[], float]:
    def measure() -> float:
        speed = store.experts_per_second(unit, depth, seconds)
        if progress is not None:
            progress(round(1000 * seconds), round(1000 * total))
        return speed

    return measure


class _Store:
    """Experts of an open pack, read over and over."""

    def __init__(self, pack: Pack, reader: Reader, keys: Sequence[ExpertKey]) -> None:
        self._reader = reader
        self._clock: Clock = time.perf_counter
        self._keys = itertools.cycle(keys)
        self._parts = {
            key: [short_name(part.name) for part in pack.parts(key.layer)] for key in keys
        }
        self._first = keys[0]
        self.expert_length = sum(pack.locate(*key).length for key in keys) / len(keys)
        self.parts_per_expert = sum(map(len, self._parts.values())) / len(keys)

    def part_seconds(self) -> float:
        """Return the seconds of a request for one part, the last of an expert."""
        began = self._clock()
        self._reader.read(*self._first, self._parts[self._first][-1])
        return self._clock() - began

    def experts_per_second(self, unit: str, depth: int, seconds: float) -> float:
        """Read experts for some seconds with `depth` requests in flight."""
        began = self._clock()
        count = 0
        with ThreadPoolExecutor(depth) as threads:
            while (now := self._clock()) - began < seconds or not count:
                experts = list(itertools.islice(self._keys, 2 * depth))
                requests = self._requests(experts, unit)
                for future in [threads.submit(self._reader.read, *one) for one in requests]:
                    future.result()
                count += len(experts)
            now = self._clock()
        return count / (now - began)

    def _requests(
        self, experts: Sequence[ExpertKey], unit: str
    ) -> Iterator[tuple[int, int] | tuple[int, int, str]]:
        for key in experts:
            if unit == "expert":
                yield key.layer, key.expert
            else:
                yield from ((key.layer, key.expert, part) for part in self._parts[key])
