"""Forecasts of `moepack run`: its misses to the byte; its output is a measured run."""

from pathlib import Path
from typing import NamedTuple

import pytest

from moepack.pack.reading.pack import Pack
from moepack.planning.forecasting.forecast import forecast
from moepack.planning.forecasting.measured_runs import read_runs
from moepack.report.facts import json_text
from moepack.running.programs.command import single_text_options
from moepack.running.programs.trace_writer import TraceWriter
from moepack.running.serving.model_server import ModelServer
from moepack.running.serving.run_facts import RunFacts, measure
from moepack.running.streaming.control import ExpertUsage
from moepack.running.streaming.supervisor import StreamingOptions
from moepack.traces.formats.reading import import_trace
from moepack.traces.model import Phase
from tests.support.machines import machine
from tests.support.needs import needs_llama
from tests.support.supervised import supervised

pytestmark = [pytest.mark.long, needs_llama]


class Run(NamedTuple):
    """The facts of a text, and the usage of the server in all.

    It computes two tokens before it answers anybody.
    """

    facts: RunFacts
    usage: ExpertUsage


def run(pack: Pack, options: StreamingOptions, trace: Path) -> Run:
    """Have a text computed, and all choices recorded."""
    # One thread: several of them wait for each other in a loop, on processors that others use.
    words = single_text_options(64, 1, options.micro_batch)
    with (
        TraceWriter(trace, pack) as writer,
        ModelServer(pack, options, options=words, trace=writer) as server,
        measure(server, lambda: server.client.complete("the sea", count=24)) as answer,
    ):
        for _ in answer:
            pass
        return Run(answer.facts, server.usage)


@pytest.mark.parametrize("count", [9, 20, 32])
def test_misses_are_those_of_a_run_with_the_same_trace(
    count: int, packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for so many of the 32 experts of a model with experts of one length.

    As if no token were a prompt's.
    """
    monkeypatch.setattr(TraceWriter, "_phase", lambda *_: Phase.DECODE)
    path, trace = packs["deepseek2"], tmp_path / "run.moetrace"
    with Pack(path) as pack:
        (length,) = {family.expert_length for family in pack.shape.routed.values()}
        with supervised(path, micro_batch=1) as serving:
            room = serving.supervisor.whole_length // pack.shape.routed_count
        options = StreamingOptions((count + 4) * room, micro_batch=1, prefetch=False)
        _, usage = run(pack, options, trace)
    token_count = import_trace([str(trace)], tmp_path / "copy").token_count
    box = machine(bandwidth=20, drive=2)
    (speed,) = forecast(
        path, box, budget=count * length, traces=[str(trace)], micro_batch=1
    ).forecasts
    lookups = usage.hit_count + usage.miss_count
    assert speed.hit_rate == pytest.approx(usage.hit_count / lookups)
    assert speed.missed_length == round(usage.miss_count * length / token_count)
    # What is chosen again before the memory of what was evicted is needed is not read again.
    assert 0.5 * usage.miss_count * room < usage.read_length <= usage.miss_count * room


def test_what_a_run_says_is_a_receipt(packs: dict[str, Path], tmp_path: Path) -> None:
    with Pack(packs["deepseek2"]) as pack:
        options = StreamingOptions("floor", micro_batch=1)
        facts, _ = run(pack, options, tmp_path / "run.moetrace")
    path = tmp_path / "receipt.json"
    path.write_text(json_text(facts))
    (receipt,) = read_runs([str(path)])
    assert (receipt.kind, receipt.exclusion) == ("stream", None)
    assert receipt.tokens_per_second == pytest.approx(facts.tokens_per_second)
    assert receipt.read_length == pytest.approx(facts.length_per_token)
    assert receipt.model_length == facts.model_length
    box = machine(bandwidth=20, drive=2)
    calibrated = forecast(
        packs["deepseek2"], box, budget=facts.memory.experts, receipts=[str(path)]
    )
    assert [one.refusal for one in calibrated.receipts] == [None]
    assert calibrated.next_receipt is None
