"""Whatever comes, goes or fails: what is held is there, and no more than its budget."""

import mmap
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.caching import cache as caching
from moepack.engines.gguf_layout import lay_out
from moepack.errors import MachineError, PackError
from moepack.keys import ExpertKey
from moepack.reading.batch import Batch
from moepack.reading.pack import Pack
from moepack.reading.reader import Reader
from moepack.running.expert_memory import ExpertMemory
from moepack.running.expert_store import ExpertStore
from moepack.running.places import Places, find_places, length_of
from moepack.shape import ROUTED_FAMILY
from tests.support.faulty_backend import Fault, FaultyBackend, make
from tests.support.gguf_builder import Q8_0, add_experts, moe, write_shards
from tests.support.models import pack_model
from tests.support.resident import PAGE, resident_length

_EXPERTS = 8
_STEPS = 150


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pack]:
    """Pack a model whose layers have experts of two lengths, of whole pages and not."""
    folder = tmp_path_factory.mktemp("store")
    builder = moe(layers=(), experts=_EXPERTS, block_count=4)
    for layer in range(4):
        ne = (512, 512) if layer % 2 else (512, 608)
        add_experts(builder, layer, _EXPERTS, ne, Q8_0, (32, 34))
    pack_model(write_shards([builder], folder), folder / "pack")
    with moepack.open(folder / "pack") as opened:
        yield opened


class Stage:
    """A store over real memory and a real reader, which notes how much is in memory as it reads."""

    def __init__(self, pack: Pack, reader: Reader, policy: str, budget: int, reserve: int) -> None:
        self._reader = reader
        layout = lay_out(pack, PAGE)
        self.places = find_places(pack, layout)[ROUTED_FAMILY]
        self._below = mmap.mmap(-1, layout.length)
        self._address = int(np.frombuffer(self._below, np.uint8).ctypes.data)
        self.memory = ExpertMemory(self._address, layout.length)
        self.memory.supply(budget + reserve)
        lengths = {key: length_of(places) for key, places in self.places.items()}
        self.cache = caching.make(policy, budget, lengths)
        self.store = ExpertStore(self, self.memory, self.places, self.cache, reserve)  # type: ignore[arg-type]
        self.peak = 0
        self._right = {
            key: {part: bytes(reader.read(*key, part=part)) for part in places}
            for key, places in self.places.items()
        }

    def submit(self, keys: Any, *, family: str | None = None, into: Any) -> Batch:
        """Begin to read, once all pages for it are there."""
        for views in into:
            for view in views.values():
                view[:] = bytes(len(view))
        self.peak = max(self.peak, self.resident())
        return self._reader.submit(keys, family=family, into=into)

    def resident(self) -> int:
        """Return the bytes that are in memory."""
        return resident_length(self._address, len(self._below))

    def check(self) -> None:
        """Compare all that the cache claims to hold with the pack."""
        for key, places in self.places.items():
            if key in self.cache:
                self._check_expert(key, places)

    def _check_expert(self, key: ExpertKey, places: Places) -> None:
        for part, span in places.items():
            assert bytes(self.memory.view(span)) == self._right[key][part], (key, part)

    def edges(self) -> int:
        """Return what pages that several experts share may take."""
        return 2 * PAGE * sum(map(len, self.places.values()))

    def step(self, dice: random.Random) -> None:
        """Hold what a layer chose, and perhaps expect what the next one does."""
        layer = dice.randrange(4)
        self.store.hold(layer, [dice.randrange(_EXPERTS) for _ in range(dice.randint(1, 3))])
        if dice.random() < 0.6:
            following = dice.sample(range(_EXPERTS), 3)
            self.store.expect((layer + 1) % 4, following)
            if dice.random() < 0.7:
                self.store.hold((layer + 1) % 4, following[:2])


BUDGET, RESERVE = 10 << 20, 3 << 20


@pytest.mark.parametrize("policy", ["lru", "layer"])
@pytest.mark.parametrize("reserve", [0, RESERVE])
def test_memory_stays_within_its_budget_while_it_reads(
    pack: Pack, policy: str, reserve: int
) -> None:
    with pack.reader(backend="buffered") as reader:
        stage = Stage(pack, reader, policy, BUDGET, reserve)
        dice = random.Random(1)
        for _ in range(_STEPS):
            stage.step(dice)
            stage.check()
        stage.store.forget()
        assert stage.store.usage.tally.miss_count > 50
        assert (stage.store.usage.prefetched_count > 0) == (reserve > 0)
        assert BUDGET - (1 << 20) < stage.peak <= BUDGET + reserve + stage.edges()


def test_a_step_beyond_the_budget_has_the_reserve_and_nothing_is_expected_beside_it(
    pack: Pack,
) -> None:
    with pack.reader(backend="buffered") as reader:
        budget = BUDGET // 2
        stage = Stage(pack, reader, "lru", budget, RESERVE)
        for layer in (0, 1, 0):
            stage.store.hold(layer, range(_EXPERTS))
            assert stage.cache.held_length > budget
            stage.store.expect(layer + 1, range(_EXPERTS))
            over = stage.cache.held_length - budget
            expected = stage.store._length_of(stage.store._expected.keys)
            assert expected <= max(0, RESERVE - over)
            assert stage.peak <= max(budget + RESERVE, stage.cache.held_length) + stage.edges()
        stage.check()


@pytest.mark.parametrize("fault", [{"code": 5}, {"flip": 7}])
def test_what_is_held_is_there_whatever_fails(pack: Pack, fault: dict[str, int]) -> None:
    failing = Fault(times=0, **fault)  # type: ignore[arg-type]
    with (
        pack.reader(backend="buffered") as reader,
        pack.reader(backend=FaultyBackend(make("buffered"), failing), check="always") as faulty,
    ):
        stage = Stage(pack, reader, "lru", BUDGET, RESERVE)
        stage._reader = faulty
        dice = random.Random(2)
        failures = 0
        for _ in range(_STEPS):
            failing.times = dice.choice([0, 0, 1, 2])
            try:
                stage.step(dice)
            except (MachineError, PackError):
                failures += 1
            failing.times = 0
            stage.check()
            if dice.random() < 0.2:
                stage.store.forget()
        stage.store.forget()
        assert failures > 5
        assert stage.peak <= BUDGET + RESERVE + stage.edges()


def test_an_interruption_of_waiting_loses_nothing(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, interrupted = Batch.close, False

    def once(batch: Batch) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt
        close(batch)

    with pack.reader(backend="buffered") as reader:
        stage = Stage(pack, reader, "lru", BUDGET, RESERVE)
        stage.store.hold(0, range(_EXPERTS))
        for layer in (1, 2, 3):
            stage.store.expect(layer, range(_EXPERTS))
            interrupted = False
            monkeypatch.setattr(Batch, "close", once)
            with pytest.raises(KeyboardInterrupt):
                stage.store.forget()
            monkeypatch.undo()
        stage.store.hold(0, range(_EXPERTS))
        stage.store.forget()
        stage.check()
        assert stage.resident() <= BUDGET + RESERVE + stage.edges()


def test_a_guess_that_cannot_be_read_is_no_error(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pack.reader(backend="buffered") as reader:
        stage = Stage(pack, reader, "lru", BUDGET, RESERVE)

        def submit(*arguments: Any, **options: Any) -> Batch:
            raise MachineError("no more rings")

        monkeypatch.setattr(stage, "submit", submit)
        stage.store.expect(1, range(_EXPERTS))
        assert not stage.store._expected.keys
        with pytest.raises(MachineError, match="no more rings"):
            stage.store.hold(1, [0])
        monkeypatch.undo()
        stage.store.hold(1, [0])
        stage.check()
