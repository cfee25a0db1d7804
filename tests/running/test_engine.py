"""A model runs from a pack as it does from its file, in less memory than its experts need."""

import gc
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.errors import MachineError, PackError, RequestError
from moepack.keys import ExpertKey
from moepack.reading.pack import Pack
from moepack.running.engine import Engine
from moepack.running.places import find_places
from tests.support import runs
from tests.support.faulty_backend import Fault, FaultyBackend, make
from tests.support.models import REAL_MODELS, first_shard, flip, pack_model
from tests.support.needs import needs_llama
from tests.support.runs import BATCHES, CONTEXT, LEAST, given_up_layers, run

pytestmark = needs_llama


def loaded(model: str, batch_count: int) -> list[Any]:
    """Return the logits of the model that is fully loaded."""
    return runs.loaded(first_shard(model), batch_count)


@pytest.fixture
def pack(packs: dict[str, Path]) -> Iterator[Pack]:
    """Open the pack of qwen3moe."""
    with moepack.open(packs["qwen3moe"]) as opened:
        yield opened


@pytest.mark.parametrize("policy", ["lru", "layer+lfu"])
@pytest.mark.parametrize("model", REAL_MODELS)
def test_logits_are_those_of_the_loaded_model_though_experts_come_and_go(
    model: str, policy: str, packs: dict[str, Path]
) -> None:
    options = LEAST._replace(policy=policy)
    with moepack.open(packs[model]) as pack, Engine(pack, options) as engine:
        found = run(engine)
        given_up = given_up_layers(engine)
        batch_count, layers = engine.batch_count, set(engine.shape.routed)
    assert given_up == layers, "some layer never had to give up an expert"
    expected = loaded(model, batch_count)
    assert all(map(np.array_equal, found, expected))


def feed_all(engine: Engine) -> None:
    for batch in BATCHES:
        engine.feed(batch)


@pytest.mark.parametrize("model", ["qwen3moe", "gpt-oss", "granite"])
def test_shards_are_run_as_they_lie(model: str, tmp_path: Path) -> None:
    moepack.index_model(first_shard(model), tmp_path / "index")
    with moepack.open(tmp_path / "index") as pack, Engine(pack, LEAST) as engine:
        found, batch_count = run(engine), engine.batch_count
    assert all(map(np.array_equal, found, loaded(model, batch_count)))


def test_long_prompts_are_computed_in_batches_whose_experts_fit(pack: Pack) -> None:
    with Engine(pack, LEAST) as engine:
        least, room = engine.batch_count, engine.memory.experts
        engine.feed(BATCHES[0])
        assert engine.held_length <= room
    with Engine(pack, LEAST._replace(memory=None)) as engine:
        assert least < engine.batch_count == CONTEXT
        engine.feed(BATCHES[0])
        assert engine.held_length <= engine.memory.experts


def test_other_experts_give_other_logits(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(*arguments: Any) -> Any:
        found = find_places(*arguments)
        routed = found["ffn_exps"]
        for expert in range(0, 16, 2):
            one, other = ExpertKey(0, expert), ExpertKey(0, expert + 1)
            routed[one], routed[other] = routed[other], routed[one]
        return found

    with Engine(pack, LEAST) as engine:
        right = run(engine)
    monkeypatch.setattr("moepack.running.engine.find_places", swapped)
    with Engine(pack, LEAST) as engine:
        assert not any(map(np.array_equal, run(engine), right))


def test_pinned_experts_are_there_from_the_start_and_stay(tmp_path: Path) -> None:
    counts = {(layer, expert): 100 - expert for layer in range(2) for expert in range(16)}
    pack_model([first_shard("qwen3moe")], tmp_path / "pack", counts=counts)
    with moepack.open(tmp_path / "pack") as pack:
        pinned = pack.hottest(200_000)
        with Engine(pack, LEAST._replace(pinned=200_000)) as engine:
            cache = engine._store._cache
            assert len(pinned) > 2
            assert engine.memory.pinned == engine.held_length
            for batch in BATCHES:
                engine.feed(batch)
                assert all(key in cache for key in pinned)
            tally = engine.usage.tally
            assert min(tally.hit_count, tally.miss_count) > 0


@pytest.mark.parametrize("model", ["qwen3moe", "deepseek2", "gpt-oss"])
def test_routers_are_left_alone_where_nothing_can_be_missing(
    model: str, packs: dict[str, Path]
) -> None:
    """Hits are counted as if they had been watched, and logits are the same."""
    tallies = []
    for all_choices in (True, False):
        options = LEAST._replace(memory=None, pinned=1 << 30, all_choices=all_choices)
        with moepack.open(packs[model]) as pack, Engine(pack, options) as engine:
            found = run(engine)
            watched = set(engine._routers.chosen)
            assert watched == (set(engine.shape.routed) if all_choices else set())
            assert engine.usage.tally.miss_count == 0
            engine.usage.tally.hit_count = 0  # the last layer of a prompt computes for one token
            for batch in BATCHES[1:]:
                engine.feed(batch)
            tallies.append(engine.usage.tally)
            batch_count = engine.batch_count
        assert all(map(np.array_equal, found, loaded(model, batch_count)))
    assert tallies[0] == tallies[1]
    assert tallies[0].hit_count > 0


def test_what_comes_in_at_last_ends_watching_too(pack: Pack) -> None:
    with Engine(pack, LEAST._replace(memory=None)) as engine:
        for token in range(3, 200):
            engine.feed([token])
            if engine._store.holds_all:
                break
            assert set(engine._routers.chosen) == set(engine.shape.routed)
            engine.rewind(0)
        engine.feed([5])
        assert not engine._routers.chosen
        engine.feed([5, 6])
        assert engine._routers.chosen, "how many experts several tokens choose is not known"


def test_too_little_memory_is_refused_with_the_numbers(pack: Pack) -> None:
    with pytest.raises(RequestError) as refused:
        Engine(pack, LEAST._replace(memory=500_000))
    text = str(refused.value)
    assert "too little memory" in text
    assert "488.3 KiB" in text
    assert all(word in text for word in ("dense", "context", "experts of one token"))
    assert "--memory floor" in (refused.value.hint or "")
    floor = text.partition("expected ")[2].partition(" (")[0]
    with Engine(pack, LEAST) as engine:
        total = engine.memory.dense + engine.memory.context + engine.memory.experts
    assert floor == moepack.sizes.size_text(total)


def test_what_is_no_option_is_refused(pack: Pack) -> None:
    for wrong, words in (
        ({"policy": "clock"}, "no such policy"),
        ({"prefetch": False}, "no such prefetching"),
        ({"threads": 0}, "threads out of bounds"),
        ({"context": 0}, "context length out of bounds"),
        ({"check": "sometimes"}, "no such check"),
        ({"backend": "carrier pigeon"}, "no such backend"),
    ):
        with pytest.raises(RequestError, match=words):
            Engine(pack, LEAST._replace(**wrong))


def test_a_pack_without_its_dense_part_is_refused(tmp_path: Path) -> None:
    pack_model([first_shard("qwen3moe")], tmp_path / "pack", experts_only=True)
    with (
        moepack.open(tmp_path / "pack") as pack,
        pytest.raises(PackError, match="not a whole pack"),
    ):
        Engine(pack, LEAST)


@pytest.mark.parametrize("backend", ["buffered", "direct", "uring"])
def test_a_failing_drive_ends_the_step_and_the_next_one_works(backend: str, pack: Pack) -> None:
    with Engine(pack, LEAST) as engine:
        right = run(engine)
    fault = Fault(code=5, times=0)
    drive = FaultyBackend(make(backend), fault)
    with Engine(pack, LEAST._replace(backend=drive)) as engine:
        engine.feed(BATCHES[0])
        before = engine.usage.tally.miss_count
        fault.times = 1
        with pytest.raises(MachineError, match=r"layer \d expert \d+ blob at byte"):
            feed_all(engine)
        assert engine.usage.tally.miss_count > before
        assert all(map(np.array_equal, run(engine), right))


def test_a_damaged_expert_is_an_error_and_no_text(tmp_path: Path) -> None:
    pack_model([first_shard("qwen3moe")], tmp_path / "pack")
    with moepack.open(tmp_path / "pack") as pack:
        where = [pack.locate(1, expert, "down") for expert in range(16)]
    for place in where:
        flip(place.path, place.offset + 5)
    with moepack.open(tmp_path / "pack") as pack:
        with Engine(pack, LEAST) as engine:
            for _ in range(2):
                with pytest.raises(PackError, match=r"layer 1 expert \d+ ffn_down_exps.weight"):
                    engine.feed(BATCHES[0])
                assert not engine.tokens
        with Engine(pack, LEAST._replace(check="never")) as engine:
            engine.feed(BATCHES[0])


def test_a_router_that_did_not_run_is_noticed(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(pack, LEAST) as engine:
        family = engine.shape.routed[0]
        shape = engine.shape._replace(families=(*engine.shape.families, family._replace(layer=9)))
        monkeypatch.setattr(engine, "shape", shape)
        with pytest.raises(MachineError, match="routers of other layers"):
            engine.feed(BATCHES[0])
        assert not engine.tokens


def test_going_back_forgets_what_came_after(pack: Pack) -> None:
    with Engine(pack, LEAST) as engine:
        right = run(engine)
        engine.rewind(len(BATCHES[0]))
        assert engine.tokens == BATCHES[0]
        for batch, expected in zip(BATCHES[1:], right[1:], strict=True):
            engine.feed(batch)
            assert np.array_equal(engine.logits(), expected)


def test_tokens_that_do_not_fit_are_refused(pack: Pack) -> None:
    with Engine(pack, LEAST) as engine:
        with pytest.raises(RequestError, match="no logits"):
            engine.logits()
        for wrong in ([], [5] * (CONTEXT + 1), [-1], [1 << 20]):
            with pytest.raises(RequestError):
                engine.feed(wrong)
        engine.feed([5] * CONTEXT)
        assert engine.room == 0
        with pytest.raises(RequestError, match="do not fit"):
            engine.feed([5])


def test_an_interruption_ends_the_step_and_the_next_one_works(pack: Pack) -> None:
    with Engine(pack, LEAST) as engine:
        right = run(engine)
        slow = Fault(delay=0.2)
        drive = FaultyBackend(make("buffered"), slow)
        with Engine(pack, LEAST._replace(backend=drive)) as slowed:
            slow.times = None
            timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                feed_all(slowed)
            slow.delay = 0.0
            assert all(map(np.array_equal, run(slowed), right))


def test_an_interruption_comes_up_where_no_router_is_watched(pack: Pack) -> None:
    with Engine(pack, LEAST._replace(memory=None, pinned=1 << 30)) as engine:
        right = run(engine)
        timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            [run(engine) for _ in range(10_000)]
        assert all(map(np.array_equal, run(engine), right))


def test_nothing_is_left_of_an_engine_that_was_closed_or_dropped(pack: Pack) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:moepack-model")

    before = mapped()
    with Engine(pack, LEAST) as engine:
        assert mapped() > before
        engine.feed([5])
    assert mapped() == before
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        engine.feed([5])
    dropped = Engine(pack, LEAST)
    dropped.feed([5])
    del dropped
    gc.collect()
    assert mapped() == before


def test_two_engines_do_not_disturb_each_other(packs: dict[str, Path], pack: Pack) -> None:
    with (
        moepack.open(packs["mixtral"]) as other,
        Engine(pack, LEAST) as one,
        Engine(other, LEAST) as two,
    ):
        for batch in BATCHES:
            one.feed(batch)
            two.feed(batch)
        logits = one.logits(), two.logits()
        counts = one.batch_count, two.batch_count
    for model, found, count in zip(("qwen3moe", "mixtral"), logits, counts, strict=True):
        assert np.array_equal(found, loaded(model, count)[-1])


def test_a_forked_child_may_not_use_it_and_harms_nobody(pack: Pack) -> None:
    with Engine(pack, LEAST) as engine:
        right = run(engine)
        child = os.fork()
        if not child:
            code = 1
            try:
                engine.feed(BATCHES[0])
            except RequestError as error:
                code = 0 if "forked" in str(error) else 2
            engine.close()
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert all(map(np.array_equal, run(engine), right))


def test_where_there_are_no_files_in_memory_one_without_a_name_does(
    pack: Pack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Engine(pack, LEAST) as engine:
        right = run(engine)
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Engine(pack, LEAST) as engine:
        assert not list(tmp_path.iterdir()), "another program could load it"
        assert all(map(np.array_equal, run(engine), right))
