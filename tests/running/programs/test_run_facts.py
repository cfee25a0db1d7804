"""Figures of a text, while it is computed."""

import threading
import time

import pytest

from moepack.pack.opening.open_model import open_model
from moepack.running.pager.pager import PagerOptions
from moepack.running.programs.command import single_text_options
from moepack.running.programs.model_server import ModelServer
from moepack.running.programs.run_facts import MeasuredAnswer, measure
from moepack.running.programs.sampling import Sampling
from tests.support.models import first_shard
from tests.support.needs import needs_llama

pytestmark = [pytest.mark.long, needs_llama]


def test_a_prompt_moves_on_layer_by_layer_within_a_batch() -> None:
    """Of the server alone it would be nothing, and then all: its batch holds the whole prompt."""
    steps: list[tuple[int, int]] = []
    ended = threading.Event()

    def watch(answer: MeasuredAnswer) -> None:
        while not ended.is_set():
            if (progress := answer.prompt_progress) is not None:
                steps.append(progress)
            time.sleep(0.002)

    text = "hello world " * 230
    greedy = Sampling(temperature=0)
    with open_model(first_shard("qwen3moe")) as pack:
        options = PagerOptions("floor")
        words = [*single_text_options(2048, 1, 8), "-b", "2048"]
        with ModelServer(pack, options, options=words, api_key="sesame") as server:
            with measure(
                server, lambda: server.client.complete(text, count=2, sampling=greedy)
            ) as answer:
                pieces = iter(answer)
                thread = threading.Thread(target=watch, args=(answer,))
                thread.start()
                next(pieces)
                ended.set()
                thread.join()
            facts = answer.facts
            counts = [count for count, _ in steps]
            assert {total for _, total in steps} == {facts.prompt_count}
            assert counts == sorted(counts)
            assert len({count for count in counts if 0 < count < facts.prompt_count}) > 3
            # The next text goes on where this one ended: what is kept counts for nothing.
            with measure(
                server, lambda: server.client.complete(text + "again", count=1, sampling=greedy)
            ) as answer:
                list(answer)
            kept = answer.facts.kept_count
            assert kept > 0
            assert answer.prompt_progress == (answer.facts.prompt_count - kept,) * 2


def test_pinned_experts_are_told_as_they_come() -> None:
    reports: list[tuple[int, int]] = []
    with open_model(first_shard("qwen3moe")) as pack:
        options = PagerOptions(1 << 30, pinned=300_000)
        words = single_text_options(64, 1, 8)
        with ModelServer(pack, options, options=words, pinning=lambda *one: reports.append(one)):
            pass
    assert len(reports) > 1
    assert {total for _, total in reports} == {sum(length for length, _ in reports)}
