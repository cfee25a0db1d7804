"""Clients that leave in the middle of a prompt: it is computed no further, and nothing is lost."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.support import architectures
from tests.support.children import wait_until
from tests.support.models import first_shard
from tests.support.needs import require_llama
from tests.support.paced_server import PacedServer, paced_server, read_answer

LAYERS = 24
FIRST = [(31 * n * n + 5) % 250 for n in range(280)]
NEXT = [*FIRST[:260], *((7 * n * n + 3) % 250 for n in range(160))]
SLOW = 200
"""Milliseconds of a read. NEXT then takes more than ten seconds, and a layer half of one."""
MOST_SECONDS = 4.0
"""Until a text that was left is not computed any more, on a busy machine."""

Start = Callable[[Path, int], AbstractContextManager[PacedServer]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_llama()
    path = tmp_path_factory.mktemp("leaving") / "m.gguf"
    return architectures.write("gpt-oss", path, block_count=LAYERS, context_length=2048)


@pytest.fixture
def start(preloaded: Callable[[str], Path], tmp_path: Path) -> Start:
    """Return a function that serves a model to so many texts at once."""
    return partial(paced_server, faulty_reads=preloaded("faulty_reads"), folder=tmp_path)


def test_a_prompt_that_is_left_ends_at_the_next_layer_and_what_was_before_it_is_kept(
    start: Start, model: Path
) -> None:
    with start(model, 1) as one:
        one.ask(FIRST)
        expected = one.ask(NEXT)
        assert expected.kept_count == 260
        first = one.ask(FIRST)
        one.pace(SLOW)
        with one.asking(NEXT):
            one.wait_for_a_layer()
        assert one.wait_until_idle() < MOST_SECONDS
        one.pace(0)
        assert one.ask(NEXT) == expected
        assert one.ask(FIRST) == first


def test_the_next_client_waits_for_no_more_than_a_layer(start: Start, model: Path) -> None:
    """It comes before the server has looked whether the one before it is there."""
    with start(model, 1) as one:
        one.ask(NEXT)
        expected = one.ask(FIRST)
        one.pace(SLOW)
        with one.asking(NEXT):
            one.wait_for_a_layer()
        (left,) = one.slots()
        time.sleep(0.4)
        with one.asking(FIRST) as client:
            began = time.monotonic()
            wait_until(lambda: one.slots()[0]["id_task"] != left["id_task"])
            assert time.monotonic() - began < MOST_SECONDS
            one.pace(0)
            assert read_answer(client) == expected


def test_several_that_leave_keep_their_texts(start: Start, model: Path) -> None:
    other = [token + 1 for token in FIRST[:120]]
    longer = [*other, *NEXT[260:]]
    with start(model, 2) as two:
        with two.asking(FIRST) as first, two.asking(other) as second:
            read_answer(first), read_answer(second)
        two.pace(SLOW)
        with two.asking(NEXT), two.asking(longer):
            two.wait_for_a_layer()
            time.sleep(0.5)
        assert two.wait_until_idle() < MOST_SECONDS
        two.pace(0)
        assert two.ask(NEXT).kept_count == 260
        assert two.ask(longer).kept_count == 120


def test_a_text_beside_one_that_is_left_goes_on(start: Start) -> None:
    """Their batch serves somebody who waits."""
    require_llama()
    with start(first_shard("qwen3moe"), 2) as two:
        expected = two.ask(FIRST, 12)
        two.pace(SLOW // 4)
        with two.asking(FIRST, 12) as client:
            two.wait_for_a_layer()
            with two.asking(NEXT):
                two.wait_for_a_layer()
            assert read_answer(client).tokens == expected.tokens


def test_a_drive_that_takes_seconds_delays_a_text_and_nothing_else(start: Start) -> None:
    require_llama()
    with start(first_shard("qwen3moe"), 1) as one:
        expected = one.ask(FIRST)
        one.pace(1000)
        with one.asking(NEXT), one.asking(FIRST) as client:
            one.wait_for_a_layer()
            began = time.monotonic()
            assert one.server.client.request("/health") == {"status": "ok"}
            assert time.monotonic() - began < 1
            one.pace(0)  # and all ends, as if nothing had been
            assert read_answer(client).tokens == expected.tokens
        assert one.wait_until_idle() < MOST_SECONDS


def test_a_client_is_told_how_far_its_prompt_is_within_a_batch(start: Start, model: Path) -> None:
    """The server itself tells it once a batch, of which this is one."""
    with start(model, 1) as one:
        one.ask(FIRST[:100])
        one.pace(SLOW // 8)
        with one.asking(FIRST[:250], 1, stream=True, return_progress=True) as client:
            lines = client.getresponse().read().decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "progress" in line]
    told = [event["prompt_progress"] for event in events]
    counts = [progress["processed"] for progress in told]
    assert (counts[0], counts[-1]) == (100, 250)
    assert counts == sorted(counts)
    assert len({count for count in counts if 100 < count < 250}) > 2
    times = [progress["time_ms"] for progress in told]
    assert times == sorted(times)
    assert {(progress["total"], progress["cache"]) for progress in told} == {(250, 100)}
