"""Simulations: options, errors, and the facts beside hit rates."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import ROUTED_FAMILY, ExpertKey, FamilyShape, ModelShape
from moepack.report import chart, trace_text
from moepack.traces.formats import reading
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.model import Phase
from moepack.traces.simulation.facts import CurvePoint, Simulation
from moepack.traces.simulation.simulate import simulate
from tests.support import warm_command
from tests.support.models import FIXTURES, first_shard
from tests.support.routing import EXPERTS, LAYERS, RoutedCall, items_of
from tests.support.shapes import shape_of_counts

SHAPE = ModelShape(
    tuple(FamilyShape(layer, ROUTED_FAMILY, EXPERTS, 10 + 3 * layer, 3) for layer in range(LAYERS))
)
LENGTHS = {
    ExpertKey(family.layer, expert): family.expert_length
    for family in SHAPE.families
    for expert in range(EXPERTS)
}
TOTAL = sum(LENGTHS.values())


def run(calls: Sequence[RoutedCall], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Simulation:
    """Simulate calls, as if they were read from a file, in pieces of seven tokens."""

    def feed(_: object, *takers: Any) -> Counter[str]:
        for item in items_of(calls, 7):
            for take in takers:
                take(item)
        return Counter()

    with monkeypatch.context() as patch:
        patch.setattr(reading.TraceFiles, "feed", feed)
        return simulate(["trace"], options=ReadOptions(shape=SHAPE), **options)


def test_the_cliff_the_end_and_the_even_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's experts in turns: LRU needs all of two tokens, and then has everything."""
    tokens = [[[0, 1, 2]] * LAYERS, [[3, 4, 5]] * LAYERS]
    calls = [RoutedCall(0, Phase.DECODE, [tokens[number % 2]]) for number in range(200)]
    facts = run(calls, monkeypatch, budgets=[TOTAL // 2, TOTAL], policies=["lru"])
    assert [one.decode_hit_rate for one in facts.results] == [0, 198 / 200]
    assert [one.warm_hit_rate for one in facts.results] == [0, 1]
    assert facts.step_length == TOTAL // 2
    assert facts.enough_length == facts.expert_length == TOTAL
    assert facts.cold_share == 1 / 100
    assert facts.lookups_per_expert == 50
    assert facts.is_long_enough
    assert facts.needed_token_count is None
    short = run(calls[:30], monkeypatch, budgets=[TOTAL], policies=["lru"])
    assert (short.is_long_enough, short.needed_token_count) == (False, 40)
    even = {point.budget_length: point.even_hit_rate or 0 for point in facts.curve}
    assert facts.curve[-1].budget_length == TOTAL
    assert facts.curve[-1].decode_hit_rate == 198 / 200
    assert 0.3 < even[TOTAL // 2] < 0.7, "an even router finds half of it in half of the memory"


WRONG_SHARES = ("-5%", "nan%", "1e3%", "101%", "\u0665%", "1_0%", "%", "9" * 5000 + "%")


def test_options_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [RoutedCall(0, Phase.DECODE, [[[0, 1, 2]] * LAYERS])]
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"budgets": ["much"]}, "budgets: not a size"),
        ({"budgets": ["10%"]}, "less than one token's experts in a layer"),
        *(({"budgets": [wrong]}, "not a size|more than all") for wrong in WRONG_SHARES),
        ({"budgets": [47]}, "less than one token's experts in a layer, expected at least 48 B"),
        ({"batch_count": 0}, "batch_count: not a count"),
        ({"policies": ["mru"]}, "no such policy, expected belady.*found mru"),
    ]
    for wrong, words in wrongs:
        with pytest.raises(RequestError, match=words):
            run(calls, monkeypatch, **wrong)
    with pytest.raises(RequestError, match="no layer with routed experts"):
        simulate(["trace"], options=ReadOptions(shape=ModelShape(())))


def test_where_no_lengths_are_known_the_model_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="bytes of an expert are not known") as refused:
        simulate([write_route(tmp_path / "t.csv")])
    assert "`model`" in (refused.value.hint or "")


def write_route(path: Path, rows: Sequence[tuple[int, int, int]] = ()) -> str:
    """Write a trace of BigMoeOnEdge: (step, layer, expert) as decoded."""
    rows = rows or [(step, layer, step * 7 % 4) for step in range(20) for layer in (3, 5)]
    text = "".join(f"0,1,{step},{layer},0,{expert},0\n" for step, layer, expert in rows)
    path.write_text(f"turn,phase,step,layer,slot,expert,x\n{text}")
    return str(path)


def test_layers_for_multi_token_prediction_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write_route(tmp_path / "t.csv")
    shape = shape_of_counts({3: 4, 5: 4}, 9)._replace(mtp_layers=(5,))
    facts = simulate([path], options=ReadOptions(shape=shape))
    assert facts.warnings == {"of layers for multi-token prediction": 20}
    assert (facts.expert_length, facts.step_length) == (36, 9)


def test_counts_are_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "h.csv").write_text("layer,expert,count\n3,0,5\n3,1,7\n")
    shape = ReadOptions(shape=shape_of_counts({3: 4, 5: 4}, 9))
    with pytest.raises(TraceError, match=r"h\.csv: no tokens in it"):
        simulate([str(tmp_path / "h.csv")], options=shape)
    both = [write_route(tmp_path / "t.csv"), str(tmp_path / "h.csv")]
    assert simulate(both, options=shape).warnings == {"counts without tokens": 12}


def test_the_text_and_the_picture_say_what_was_found(tmp_path: Path) -> None:
    path = write_route(tmp_path / "t.csv")
    options = ReadOptions(shape=shape_of_counts({3: 4, 5: 4}, 1 << 20))
    facts = simulate([path], budgets=["50%", "100%"], options=options)
    text = str(trace_text.simulation(facts))
    assert "20 tokens in 1 request, 20 of them decoded" in text
    assert "experts: 8.0 MiB; a decoded token uses 2.0 MiB" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("8.0 MiB"))
    rates = [o.decode_hit_rate for o in facts.results if o.budget_share == 1]
    assert line.split()[3:7] == ["–" if rate is None else f"{rate:.1%}" for rate in rates]
    assert "too short to tell experts apart" in text
    none = replace(facts, step_length=None, curve=(CurvePoint(1 << 20, None, None),))
    assert "a decoded token uses –" in str(trace_text.simulation(none))
    pytest.importorskip("matplotlib")
    chart.hit_rates(none, "a title", str(tmp_path / "none.png"))
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")
    drawn = []
    for target in (tmp_path / "one.svg", tmp_path / "other.svg"):
        chart.hit_rates(facts, "a title", str(target))
        drawn.append(target.read_text())
    assert drawn[0] == drawn[1]
    assert "<!-- a title -->" in drawn[0]


def test_the_command_prints_what_the_call_returns() -> None:
    path, model = str(FIXTURES / "qwen3moe-trace.csv"), first_shard("qwen3moe")
    words = ["--json", "--model", str(model), "--budgets", "256KiB,50%", "--policies", "lru,lrfu"]
    printed = json.loads(warm_command.run(["simulate", path, *words]).stdout)
    facts = simulate([path], model=model, budgets=["256KiB", "50%"], policies=["lru", "lrfu"])
    assert printed["results"] == [asdict(one) for one in facts.results]
    assert len(printed["results"]) == 4
    refused = warm_command.run(["simulate", path, "--batch", "9" * 5000])
    assert (refused.returncode, "mistake" in refused.stderr) == (2, False)


def test_enough_is_the_least_that_hits_all_but_a_hundredth(tmp_path: Path) -> None:
    """One of 200 lookups, or two, come back so late that they hit with all experts only."""
    for rare, enough in ((1, 200), (3, 400)):
        experts = [0, 1] * 150
        for number in range(rare):
            experts[60 * number + 20 : 60 * number + 20] = [2, 3]
        rows = [(step, 3, expert) for step, expert in enumerate(experts)]
        path = write_route(tmp_path / f"{rare}.csv", rows)
        options = ReadOptions(shape=shape_of_counts({3: 4}, 100))
        facts = simulate([path], policies=["lru"], options=options)
        assert facts.enough_length == enough
