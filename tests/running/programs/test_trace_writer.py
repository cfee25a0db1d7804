"""The routed experts of a program become the same trace as a recording's, as computed."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.common.errors import MachineError, RequestError
from moepack.pack.opening.open_model import open_model
from moepack.running.pager.pager import PagerOptions
from moepack.running.programs.model_server import ModelServer
from moepack.running.programs.recording import record_trace
from moepack.running.programs.run_facts import measure
from moepack.running.programs.sampling import Sampling
from moepack.running.programs.trace_writer import TraceWriter
from moepack.traces.file_writer import Writer
from moepack.traces.model import Phase, Tokens, Unknown
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.pagers import PROMPTS, paging
from tests.support.recordings import PROMPTS as TEXTS
from tests.support.recordings import read_recording

pytestmark = [pytest.mark.long, needs_llama]

MODEL = first_shard("qwen3moe")
COUNT = 8
GREEDY = Sampling(temperature=0)


def chosen_in(tokens: Tokens, layer: int) -> list[list[int]]:
    """Return the experts of each token in a layer."""
    pairs = zip(tokens.starts[:-1], tokens.starts[1:], strict=True)
    return [
        tokens.expert[start:end][tokens.layer[start:end] == layer].tolist() for start, end in pairs
    ]


@pytest.fixture
def pack() -> Iterator[moepack.Pack]:
    with open_model(MODEL) as one:
        yield one


def test_texts_that_are_answered_are_the_trace_of_a_recording(
    pack: moepack.Pack, tmp_path: Path
) -> None:
    with TraceWriter(tmp_path / "run", pack, has_requests=True) as trace:
        words = ["-c", "256", "-np", "1", "-t", "1", "--cache-ram", "0", "-b", "256", "-ub", "256"]
        with ModelServer(pack, PagerOptions(), options=words, trace=trace) as server:
            complete = partial(server.client.complete, count=COUNT, sampling=GREEDY)
            for text in TEXTS:
                with measure(server, partial(complete, text)) as answer:
                    list(answer)
    options: Any = {"tokens": COUNT - 1, "temperature": 0, "context": 256, "threads": 1}
    record_trace(MODEL, TEXTS, tmp_path / "recorded", memory="floor", **options)
    origin, tokens = read_recording(tmp_path / "run")
    expected_origin, expected = read_recording(tmp_path / "recorded")
    assert (origin.name, origin.model) == (expected_origin.name, expected_origin.model)
    assert not origin.unknown
    assert tokens.request.tolist() == expected.request.tolist()
    assert tokens.phase.tolist() == expected.phase.tolist()
    for layer in (0, 1):
        assert chosen_in(tokens, layer) == chosen_in(expected, layer)


def test_a_prompt_ends_with_its_first_output_in_batches_of_any_length(
    pack: moepack.Pack, tmp_path: Path
) -> None:
    rows = np.arange(12, dtype=np.uint16).reshape(3, 4)
    steps = [{0: rows}, {0: rows[:1], 1: rows[:1]}, {0: rows[:1], 1: rows[:1]}]
    with TraceWriter(tmp_path / "trace", pack, has_requests=True) as trace:
        trace.write([(request, step) for request in (1, 2) for step in steps], 4)
    _, tokens = read_recording(tmp_path / "trace")
    assert tokens.phase.tolist() == 2 * [*4 * [Phase.PREFILL], Phase.DECODE]


@pytest.mark.parametrize("used", [2, 8])
def test_another_number_of_experts_counts_for_the_memory_and_in_the_trace(
    used: int, pack: moepack.Pack, tmp_path: Path
) -> None:
    floors: list[int] = []
    for more in ([], ["--override-kv", f"qwen3moe.expert_used_count=int:{used}"]):
        words = ["-c", "64", "-np", "1", "-t", "1", "--cache-ram", "0", "-b", "32", "-ub", "1"]
        path, options = tmp_path / f"trace{len(floors)}", PagerOptions("floor")
        with (
            TraceWriter(path, pack) as trace,
            ModelServer(pack, options, options=[*words, *more], trace=trace) as server,
        ):
            list(server.client.complete("hello", count=COUNT, sampling=GREEDY))
            usage = server.usage
            floors.append(server.pager.floor)
        assert usage.resident_length <= usage.budget == floors[-1]
    assert floors[1] * 4 == floors[0] * used
    origin, tokens = read_recording(path)
    assert origin.experts_used == used
    assert {len(experts) for experts in chosen_in(tokens, 0)} == {used}


def test_of_several_texts_at_once_the_requests_are_unknown(
    pack: moepack.Pack, tmp_path: Path
) -> None:
    with (
        TraceWriter(tmp_path / "trace", pack) as trace,
        paging(MODEL, memory="floor", micro_batch=32, records=True) as run,
    ):
        with run.program("--slots", 4, "--micro-batch", 32) as program:
            run.pager.pop_calls(with_open=True)  # with which the server tries its context
            for prompts in PROMPTS:
                program.ask(*prompts)
                trace.write(run.pager.pop_calls(), 4)
        trace.write(run.pager.pop_calls(with_open=True), 4)
    origin, tokens = read_recording(tmp_path / "trace")
    assert origin.unknown == {Unknown.REQUESTS}
    lengths = [len(prompt) for prompts in PROMPTS for prompt in prompts]
    assert len(tokens.request) == sum(length + COUNT - 1 for length in lengths)
    assert sum(map(len, chosen_in(tokens, 0))) == 4 * len(tokens.request)
    assert sum(map(len, chosen_in(tokens, 1))) == 4 * COUNT * len(lengths)
    assert set(tokens.phase.tolist()) == set(Phase)


def test_a_file_that_is_there_is_refused(pack: moepack.Pack, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("precious")
    with pytest.raises(RequestError, match="exists already") as refusal:
        TraceWriter(tmp_path / "trace", pack)
    assert "--force" not in (refusal.value.hint or "")
    assert (tmp_path / "trace").read_text() == "precious"


def test_a_trace_that_cannot_be_written_any_more_has_what_was_and_is_told_of(
    pack: moepack.Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Writer.keep

    def fail(self: Writer) -> None:
        raise MachineError("no space left", path=self.path)

    with (
        paging(MODEL, memory="floor", micro_batch=32, records=True) as run,
        run.program("--micro-batch", 32) as program,
    ):
        run.pager.pop_calls(with_open=True)
        trace = TraceWriter(tmp_path / "trace", pack)
        for writes in (keep, fail, keep):
            monkeypatch.setattr(Writer, "keep", writes)
            assert isinstance(program.ask([7, 8, 9]), list), "the program goes on"
            trace.write(run.pager.pop_calls(with_open=True), 4)
        assert run.pager.pop_calls() == []
        with pytest.raises(MachineError, match="no space left"), trace:
            pass
    _, tokens = read_recording(tmp_path / "trace")
    assert len(tokens.request) == 3 + COUNT - 1
