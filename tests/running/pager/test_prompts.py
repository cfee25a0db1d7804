"""Steps of many tokens: the next layer is prefetched, and used."""

import errno
import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import moepack
from moepack.common.errors import MachineError
from moepack.common.shape import ExpertKey
from moepack.pack.opening.open_model import open_model
from moepack.running.pager.pager import PagerOptions
from moepack.running.pager.prefetcher import Prefetcher
from moepack.running.pager.prompts import MANY
from moepack.running.programs.model_server import ModelServer
from moepack.storage import page_cache
from moepack.storage.threaded import ThreadedBackend
from moepack.traces.caching import cache as caching
from moepack.traces.caching.cache import Tally
from tests.support import architectures, faulty_backend
from tests.support.children import wait_until
from tests.support.faulty_backend import Fault, FaultyBackend, fault_at
from tests.support.gguf_builder import add_experts, moe
from tests.support.models import first_shard, pack_model
from tests.support.needs import needs_llama
from tests.support.pagers import Answers, Form, Paging, Program, paging

LAYERS, EXPERTS = 6, 16
ROOM = 3 * 8192
"""The bytes that an expert takes in memory: each of its parts lies on two pages."""
ALL = list(range(EXPERTS))
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of six layers that have sixteen experts each."""
    return moe(tuple(range(LAYERS)), EXPERTS).write(tmp_path_factory.mktemp("layers") / "m.gguf")


@contextmanager
def running(
    model: Path, ggml: Path, layers: float, **options: Any
) -> Iterator[tuple[Paging, Call]]:
    """Run a program that routes, with memory for so many layers; yield a function that calls it."""
    memory = int(layers * EXPERTS * ROOM) + 2 * ROOM
    with (
        paging(model, memory=memory, micro_batch=MANY, **options) as run,
        run.chooser(ggml, model) as program,
    ):
        yield run, lambda *graphs: program.call([step(*graph) for graph in graphs])


def step(layer: int, experts: list[int], token_count: int = MANY) -> tuple[Any, ...]:
    """Return a graph in which each of `experts` is chosen, by two for each token."""
    order = random.Random(layer)
    rows = [experts[n : n + 2] for n in range(0, len(experts) - 1, 2)][:token_count]
    rows += [order.sample(experts, 2) for _ in range(token_count - len(rows))]
    return 0, layer, rows, 2


def read_count(run: Paging) -> float:
    """Return how many experts were read."""
    spans = run.pager._residents.spans[ExpertKey(0, 0)]
    return run.pager.usage.read_length / sum(span.length for span in spans)


def has_read(run: Paging, count: int) -> Callable[[], bool]:
    return lambda: read_count(run) == count


def test_the_next_layer_is_read_while_one_computes(model: Path, ggml: Path) -> None:
    with running(model, ggml, 2) as (run, call):
        for layer in range(LAYERS):
            assert call((layer, ALL)) == [[0]]
            wait_until(has_read(run, EXPERTS * min(layer + 2, LAYERS)))
        assert run.pager.usage.miss_count == EXPERTS * LAYERS
        assert run.pager.usage.resident_length <= run.pager.usage.budget


def test_a_prompt_that_hits_has_the_next_layer_read_as_well(model: Path, ggml: Path) -> None:
    with running(model, ggml, 3) as (run, call):
        assert call((0, ALL, 8)) == [[0]]
        assert call((0, ALL)) == [[0]]
        wait_until(has_read(run, 2 * EXPERTS))


def test_a_few_tokens_have_nothing_read_ahead(model: Path, ggml: Path) -> None:
    with running(model, ggml, 3) as (run, call):
        assert call((0, ALL, MANY - 1), (1, [0, 1], 1)) == [[0, 0]]
        run.settle()
        assert read_count(run) == EXPERTS + 2


def test_what_the_next_layer_does_not_choose_is_hardly_read(model: Path, ggml: Path) -> None:
    """Cold, by how many experts a layer chose; later by which."""
    order = random.Random(5)
    chosen = [sorted(order.sample(ALL, 8)) for _ in range(LAYERS)]
    with running(model, ggml, 2) as (run, call):
        for _ in range(4):
            for layer in range(LAYERS):
                assert call((layer, chosen[layer])) == [[0]]
        assert read_count(run) <= 1.05 * 4 * LAYERS * 8


def test_a_prompt_of_many_passes_hits_where_the_least_recently_used_is_always_gone(
    model: Path, ggml: Path
) -> None:
    passes = 5
    with running(model, ggml, 4) as (run, call):
        for _ in range(passes):
            for layer in range(LAYERS):
                assert call((layer, ALL)) == [[0]]
        usage = run.pager.usage
        residents = run.pager._residents
        cache, lru = caching.make("lru", residents.cache.budget, run.rooms), Tally()
        for layer in range(passes * LAYERS):
            cache.step([ExpertKey(layer % LAYERS, expert) for expert in ALL], lru)
    assert lru.hit_count == 0
    # Two of four layers stay: one is computed with, one is read.
    assert usage.hit_count >= (passes - 2) * EXPERTS * 1.5


def test_what_single_tokens_choose_most_often_survives_a_prompt(model: Path, ggml: Path) -> None:
    hot = [0, 3, 5, 9]
    with running(model, ggml, 3) as (run, call):
        for _ in range(100):
            assert call(*((layer, hot, 2) for layer in range(LAYERS))) == [[0] * LAYERS]
        assert call(*((layer, ALL) for layer in range(LAYERS))) == [[0] * LAYERS]
        before = run.pager.usage.miss_count
        assert call(*((layer, hot, 2) for layer in range(LAYERS))) == [[0] * LAYERS]
        assert run.pager.usage.miss_count == before


def test_pages_that_experts_share_with_others_are_read_along(model: Path, ggml: Path) -> None:
    """No part of the model has a page of its own: a program would read them one by one."""
    with open_model([model]) as pack:
        try:
            pack.reader(backend="direct").close()
        except MachineError as error:
            pytest.skip(str(error))
    with running(model, ggml, 3, backend="direct") as (_, call):
        page_cache.drop([model])
        before = page_cache.cached_share([model])
        if before is None or before > 0.5:
            pytest.skip("the system does not say what is cached, or keeps it")
        assert call((1, ALL, 8)) == [[0]]
        expected = before + 0.9 * 3 * EXPERTS * 2176 / model.stat().st_size
        wait_until(lambda: (page_cache.cached_share([model]) or 0) >= expected)


@contextmanager
def slowed(model: Path, ggml: Path, **fault: Any) -> Iterator[tuple[Paging, Call]]:
    """Have reads of an expert of layer 1 go wrong."""
    with open_model([model]) as pack:
        backend = FaultyBackend(
            faulty_backend.make("buffered"), fault_at(pack, 1, 7, "ffn_up_exps.weight", **fault)
        )
    with running(model, ggml, 2, backend=backend) as both:
        yield both


def test_what_cannot_be_read_ahead_is_read_once_more(model: Path, ggml: Path) -> None:
    with slowed(model, ggml, code=errno.EIO, times=1) as (run, call):
        assert call((0, ALL)) == [[0]]
        wait_until(has_read(run, 2 * EXPERTS - 1))
        assert call((1, ALL)) == [[0]]
        assert not run.failures
        assert read_count(run) == 2 * EXPERTS or read_count(run) == 3 * EXPERTS


def test_what_can_be_read_neither_ahead_nor_then_fails_the_step_alone(
    model: Path, ggml: Path
) -> None:
    with slowed(model, ggml, code=errno.EIO) as (run, call):
        assert call((0, ALL)) == [[0]]
        assert not run.failures
        assert call((1, ALL)) == [[-1]]
        assert len(run.failures) == 1
        assert call((1, ALL[:6]), (2, ALL)) == [[0, 0]]


def test_a_program_that_comes_meanwhile_maps_nothing_that_is_being_read(
    model: Path, ggml: Path
) -> None:
    gate = threading.Event()
    with slowed(model, ggml, until=gate) as (run, call):
        assert call((0, ALL)) == [[0]]
        with run.chooser(ggml, model):
            mapped: set[ExpertKey] = set()
            run.do(lambda pager: mapped.update(pager._mapper.clients[-1].resident))
            assert mapped == {ExpertKey(0, expert) for expert in ALL}
        gate.set()
        assert call((1, ALL)) == [[0]]


def test_what_is_demanded_while_it_comes_unwanted_is_waited_for(model: Path, ggml: Path) -> None:
    """A single token of another layer comes between: experts in flight are not wanted any more."""
    gate = threading.Event()
    with slowed(model, ggml, until=gate) as (_, call):
        assert call((0, ALL), (5, [1, 2], 1)) == [[0, 0]]
        threading.Timer(0.2, gate.set).start()
        assert call((1, [6, 7], 1)) == [[0]]
        assert gate.is_set()


def test_a_pager_ends_while_experts_come(model: Path, ggml: Path) -> None:
    gate = threading.Event()
    with slowed(model, ggml, until=gate) as (_, call):
        assert call((0, ALL)) == [[0]]
        threading.Timer(0.2, gate.set).start()


@pytest.mark.parametrize(
    ("name", "kind", "memory"),
    [
        ("qwen3moe", "gguf", "floor"),
        ("qwen3moe", "pack", 1_150_000),
        ("mixtral", "gguf", 1_900_000),
        ("mixtral", "pack", "floor"),
    ],
)
def test_long_prompts_are_answered_as_by_the_program_alone(
    form: Form, name: str, kind: str, memory: int | str
) -> None:
    texts = [[(31 * n * n + 5 * text) % 500 for n in range(300)] for text in range(2)]
    slots = ("--slots", 2, "--micro-batch", 128)
    with Program(first_shard(name), *slots) as program:
        expected: list[Answers] = [program.ask(text) for text in texts]
        expected.append(program.ask(*texts))
    with paging(form(name, kind), memory=memory, micro_batch=128) as run:
        with run.program(*slots) as program:
            answers = [program.ask(text) for text in texts]
            answers.append(program.ask(*texts))
        assert answers == expected
        assert run.pager.usage.fault_count == 0


def test_what_is_pinned_leaves_prompts_the_rest(model: Path, ggml: Path) -> None:
    """Nothing is read beyond the budget, and experts in use are not evicted for it."""
    with running(model, ggml, 3, pinned=20 * 6528) as (run, call):
        budget = run.pager.usage.budget
        for _ in range(3):
            for layer in range(LAYERS):
                assert call((layer, ALL)) == [[0]]
                run.settle()
                assert run.pager.usage.resident_length <= budget


def test_layers_of_which_one_is_read_in_place_come_together(tmp_path: Path) -> None:
    """The parts of layer 0 fill whole pages, those of layer 1 do not; pins are read at once."""
    builder = moe((0,), 4, ne=(64, 64), type_id=0, block=(1, 4), block_count=2)
    add_experts(builder, 1, 4, (64, 32), 8, (32, 34))
    source = builder.write(tmp_path / "m.gguf")
    pack_model([source], tmp_path / "pack")
    with (
        moepack.open(tmp_path / "pack") as pack,
        pack.reader() as reader,
        paging(tmp_path / "pack", memory=1 << 20, micro_batch=1, pinned=1 << 20) as run,
    ):
        residents = run.pager._residents
        assert len(residents) == 8
        assert residents._layers_in_place == {0}
        for key, spans in residents.spans.items():
            for span in spans:
                expected = reader.read(key.layer, key.expert, span.part)
                assert residents.part(key, span.part) == expected


@needs_llama
def test_nothing_is_read_ahead_for_a_client_that_has_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server computes a micro-batch to its end all the same."""
    begun: list[bool] = []
    begin = Prefetcher.begin

    def watched(prefetcher: Prefetcher, keys: Iterable[ExpertKey]) -> None:
        begun.append(True)
        begin(prefetcher, keys)

    monkeypatch.setattr(Prefetcher, "begin", watched)
    path = architectures.write("qwen3moe", tmp_path / "m.gguf", block_count=16, context_length=512)
    backend = FaultyBackend(ThreadedBackend(direct=False), Fault(delay=0.01))
    words = ["-np", "1", "-c", "512", "-b", "512", "-ub", "512", "-t", "1", "--cache-ram", "0"]
    prompts = (range(5, 205), range(205, 5, -1))
    first, second = (json.dumps({"prompt": [*one], "n_predict": 1}).encode() for one in prompts)
    with open_model(path) as pack:
        options = PagerOptions(30 * 65536, micro_batch=512, backend=backend)
        with ModelServer(pack, options, options=words) as server:
            address = urlsplit(server.url)
            client = HTTPConnection(address.hostname or "", address.port)
            client.request("POST", "/completion", first)
            wait_until(lambda: len(begun) > 2)
            at_once = struct.pack("ii", 1, 0)  # else the gate looks for a while if it still reads
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            client.close()
            (process,) = server.pager._mapper.clients
            wait_until(lambda: not process.has_requests)
            count = len(begun)
            assert count < 14
            wait_until(lambda: server.usage.routed_count >= 200)
            assert len(begun) == count
            client.request("POST", "/completion", second)
            assert client.getresponse().status == 200
            assert len(begun) > count
