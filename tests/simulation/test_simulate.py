"""What a simulation says is what caches do that are stepped through by hand."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.caching import cache as caching
from moepack.caching.cache import Tally
from moepack.errors import RequestError, TraceError
from moepack.keys import ExpertKey
from moepack.report import chart, simulation_text
from moepack.shape import ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.simulation import simulate as simulation
from moepack.simulation.facts import CacheFacts, CurvePoint, Simulation
from moepack.simulation.simulate import simulate
from moepack.trace.formats.registry import ReadOptions
from moepack.trace.model import Phase
from tests.support.routing import EXPERTS, LAYERS, RoutedCall, items_of, routing, steps_of
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
ONLINE = caching.POLICIES


def run(
    calls: Sequence[RoutedCall],
    monkeypatch: pytest.MonkeyPatch,
    shape: ModelShape = SHAPE,
    **options: Any,
) -> Simulation:
    """Simulate calls, as if they were read from a file, in pieces of seven tokens."""

    def feed(_: object, __: object, *takers: Any) -> Counter[str]:
        for item in items_of(calls, 7):
            for take in takers:
                take(item)
        return Counter()

    with monkeypatch.context() as patch:
        patch.setattr(simulation, "feed", feed)
        return simulate(["trace"], options=ReadOptions(shape=shape), **options)


def by_policy(facts: Simulation) -> dict[str, list[CacheFacts]]:
    found: dict[str, list[CacheFacts]] = {}
    for one in facts.results:
        found.setdefault(one.policy, []).append(one)
    return found


@settings(max_examples=15)
@given(calls=routing(), batch_count=st.one_of(st.none(), st.just(2)))
def test_each_policy_does_at_each_budget_what_its_cache_does(
    calls: list[RoutedCall], batch_count: int | None
) -> None:
    budgets = list(range(60, TOTAL + 1, 37))
    with pytest.MonkeyPatch.context() as patch:
        facts = run(calls, patch, budgets=budgets, policies=ONLINE, batch_count=batch_count)
    decode_count = sum(call.phase is Phase.DECODE for call in calls)
    for policy, found in by_policy(facts).items():
        for budget, one in zip(budgets, found, strict=True):
            cache = caching.make(policy, budget, LENGTHS)
            prefill, decode = Tally(), Tally()
            for call, _, keys in steps_of(calls, batch_count):
                cache.step(keys, decode if call.phase is Phase.DECODE else prefill)
            hit_count = prefill.hit_count + decode.hit_count
            count = hit_count + prefill.miss_count + decode.miss_count
            assert one.budget_length == budget
            assert one.decode_hit_rate == decode.hit_rate
            assert one.hit_rate == hit_count / count
            assert one.read_length == prefill.missed_length + decode.missed_length
            assert one.bytes_per_token == decode.missed_length / decode_count


@given(calls=routing())
@settings(max_examples=30)
def test_where_experts_have_one_length_nothing_hits_more_than_belady(
    calls: list[RoutedCall],
) -> None:
    families = tuple(family._replace(expert_length=10) for family in SHAPE.families)
    with pytest.MonkeyPatch.context() as patch:
        # Caches by layer keep what their layer used last, even where that is over the budget.
        others = [policy for policy in ONLINE if not policy.startswith("layer")]
        policies, budgets = ["belady", *others], [60, 90, 120]
        facts = run(calls, patch, ModelShape(families), policies=policies, budgets=budgets)
    for budget in budgets:
        hits = {one.policy: one.hit_rate for one in facts.results if one.budget_length == budget}
        assert max(rate or 0 for rate in hits.values()) == hits["belady"]


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
    even = {point.budget_length: point.even_hit_rate or 0 for point in facts.curve}
    assert facts.curve[-1].budget_length == TOTAL
    assert facts.curve[-1].decode_hit_rate == 198 / 200
    assert 0.3 < even[TOTAL // 2] < 0.7, "an even router finds half of it in half of the memory"


def test_no_more_than_a_few_tokens_are_too_short_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [RoutedCall(0, Phase.DECODE, [[[0, 1, 2]] * LAYERS]) for _ in range(10)]
    facts = run(calls, monkeypatch, policies=[])
    assert not facts.is_long_enough
    assert facts.results == ()


WRONG_SHARES = ("-5%", "nan%", "1e3%", "101%", "\u0665%", "1_0%", "%", "9" * 5000 + "%")


def test_options_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [RoutedCall(0, Phase.DECODE, [[[0, 1, 2]] * LAYERS])]
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"budgets": ["much"]}, "budgets: not a size"),
        ({"budgets": ["10%"]}, "less than a token uses in a layer"),
        *(({"budgets": [wrong]}, "not a size|more than all") for wrong in WRONG_SHARES),
        (
            {"slots": [2]},
            "slots for fewer experts than a token uses in a layer, expected at least 3",
        ),
        ({"budgets": [47]}, "less than a token uses in a layer, expected at least 48 B"),
        ({"slots": [32, 0]}, "slots: not a count, expected 1 or more, found 0"),
        ({"sessions": 0}, "sessions: not a count"),
        ({"batch_count": 0}, "batch_count: not a count"),
        ({"prefetch": -1}, "prefetch: not a count"),
        ({"policies": ["mru"]}, "no such policy, expected belady.*found mru"),
    ]
    for wrong, words in wrongs:
        with pytest.raises(RequestError, match=words):
            run(calls, monkeypatch, **wrong)
    with pytest.raises(RequestError, match="no layer whose router"):
        simulate(["trace"], options=ReadOptions(shape=ModelShape(())))


def test_where_no_lengths_are_known_the_model_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "turn,phase,step,layer,slot,expert,x\n" + "".join(
        f"0,1,{step},{layer},0,{(step * 7) % 4},0\n" for step in range(20) for layer in (3, 5)
    )
    path.write_text(rows)
    with pytest.raises(RequestError, match="bytes of an expert are not known") as refused:
        simulate([str(path)])
    assert "`model`" in (refused.value.hint or "")
    stated = "# model=m.gguf n_layer=6 n_expert=4 n_expert_used=1\n"
    stated += "".join(f"# layer={n} expert_bytes={100 if n in (3, 5) else 0}\n" for n in range(6))
    path.write_text(stated + rows)
    facts = simulate([str(path)], budgets=["100%", 200])
    assert (facts.expert_length, facts.step_length) == (800, 200)
    assert {one.budget_length for one in facts.results} == {200, 800}
    other = tmp_path / "u.csv"
    other.write_text(stated.replace("=100", "=96") + rows)
    with pytest.raises(RequestError, match=r"u\.csv: traces of different models, expected as"):
        simulate([str(path), str(other)])


def test_groups_of_lookups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    calls = [
        RoutedCall(
            number // 40, Phase.DECODE, [[random.permutation(EXPERTS)[:3].tolist()] * LAYERS]
        )
        for number in range(200)
    ]
    whole = run(calls, monkeypatch, policies=["lru", "layer", "belady", "static"])
    monkeypatch.setattr("moepack.simulation.lookups._GROUP_COUNT", 25)
    assert run(calls, monkeypatch, policies=["lru", "layer", "belady", "static"]).results == (
        whole.results
    )


@given(calls=routing(), session_count=st.integers(2, 4))
@settings(max_examples=30)
def test_sessions_take_turns_call_by_call(calls: list[RoutedCall], session_count: int) -> None:
    by_request: dict[int, list[RoutedCall]] = {}
    for call in calls:
        by_request.setdefault(call.request, []).append(call)
    session_count = min(session_count, len(by_request))
    requests, turns = list(by_request.values()), list[RoutedCall]()
    running, waiting = requests[:session_count], requests[session_count:]
    while running:
        for place in range(len(running)):
            if not running[place] and waiting:
                running[place] = waiting.pop(0)
            if running[place]:
                turns.append(running[place].pop(0))
        running = [session for session in running if session or waiting]
    with pytest.MonkeyPatch.context() as patch:
        policies = ["lru", "lfu", "static-prompt"]
        options: dict[str, Any] = {"policies": policies, "budgets": [TOTAL // 3]}
        found = run(calls, patch, sessions=session_count, **options)
        alone = by_policy(run(calls, patch, **options))
    assert by_policy(found)["static-prompt"] == alone["static-prompt"], "of each request alone"
    for policy in ("lru", "lfu"):
        cache, tallies = caching.make(policy, TOTAL // 3, LENGTHS), (Tally(), Tally())
        for call, _, keys in steps_of(turns):
            cache.step(keys, tallies[call.phase is Phase.DECODE])
        (one,) = by_policy(found)[policy]
        assert one.decode_hit_rate == tallies[True].hit_rate
        assert one.read_length == sum(tally.missed_length for tally in tallies)
    assert found.curve[-1].shared_hit_rate == shared_rate(turns)


def shared_rate(calls: Sequence[RoutedCall]) -> float:
    """Return the share of decode's lookups that another request used last."""
    last: dict[ExpertKey, int] = {}
    shared = count = 0
    for call, _, keys in steps_of(calls):
        for key in dict.fromkeys(keys):
            is_decode = call.phase is Phase.DECODE
            shared += is_decode and last.get(key, call.request) != call.request
            count += is_decode
            last[key] = call.request
    return shared / count


@given(calls=routing(), guessed_count=st.integers(1, 4))
@settings(max_examples=30)
def test_guesses_are_what_a_layer_used_last_and_change_no_hits(
    calls: list[RoutedCall], guessed_count: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        budgets = [TOTAL // 3]
        found = run(calls, patch, prefetch=guessed_count, policies=["lru"], budgets=budgets)
    cache = caching.make("lru", TOTAL // 3, LENGTHS)
    last: list[list[ExpertKey]] = [[] for _ in range(LAYERS)]
    useful = wasted = useful_count = miss_count = 0
    for call, _, keys in steps_of(calls):
        recent: list[ExpertKey] = last[keys[0].layer]
        guessed = [key for key in recent[:guessed_count] if key not in cache]
        misses = cache.step(keys, Tally()).misses
        if call.phase is Phase.DECODE:
            miss_count += len(misses)
            useful_count += len(set(guessed) & set(misses))
            useful += sum(LENGTHS[key] for key in guessed if key in misses)
            wasted += sum(LENGTHS[key] for key in guessed if key not in misses)
        recent[:] = list(dict.fromkeys([*reversed(keys), *recent]))
    (one,) = found.prefetches
    token_count = found.decode_token_count
    assert one.useful_share == (useful_count / miss_count if miss_count else None)
    assert one.useful_bytes_per_token == useful / token_count
    assert one.wasted_bytes_per_token == wasted / token_count


def test_more_sessions_than_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [RoutedCall(0, Phase.DECODE, [[[0, 1, 2]] * LAYERS])]
    with pytest.raises(RequestError, match="fewer requests than sessions.*up to 1, found 2"):
        run(calls, monkeypatch, sessions=2)


def write_route(path: Path, lines: str = "", rows: Sequence[tuple[int, int, int]] = ()) -> str:
    """Write a trace of BigMoeOnEdge: what it states, and (step, layer, expert) as decoded."""
    rows = rows or [(step, layer, step * 7 % 4) for step in range(20) for layer in (3, 5)]
    text = "".join(f"0,1,{step},{layer},0,{expert},0\n" for step, layer, expert in rows)
    path.write_text(f"{lines}turn,phase,step,layer,slot,expert,x\n{text}")
    return str(path)


MODEL = "# model=m.gguf n_layer=6 n_expert=4 n_expert_used=1\n"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            MODEL + "# layer=3 expert_bytes=9\n# layer=3 expert_bytes=8\n",
            "two lengths of an expert",
        ),
        (MODEL.replace("n_expert=4", "n_expert=0") + "# layer=3 expert_bytes=9\n", "of no model"),
        (MODEL + "# layer=70000 expert_bytes=9\n", "of no model"),
        (MODEL + "# layer=3 expert_bytes=999999999999999\n", "of no model"),
        (MODEL.replace("used=1", "used=5") + "# layer=3 expert_bytes=9\n", "of no model"),
    ],
)
def test_what_a_trace_states_of_its_model_is_checked(
    tmp_path: Path, lines: str, words: str
) -> None:
    with pytest.raises(TraceError, match=rf"t\.csv.*{words}"):
        simulate([write_route(tmp_path / "t.csv", lines)])


def test_a_pipe_states_nothing_and_is_left_whole(tmp_path: Path) -> None:
    lines = MODEL + "# layer=3 expert_bytes=9\n# layer=5 expert_bytes=9\n"
    data = Path(write_route(tmp_path / "t.csv", lines)).read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    with pytest.raises(RequestError, match="bytes of an expert are not known"):
        simulate([str(pipe)])
    writer.start()
    shape = shape_of_counts({3: 4, 5: 4}, 9)
    assert simulate([str(pipe)], options=ReadOptions(shape=shape)).token_count == 20
    writer.join()


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


def test_the_layers_of_the_model_share_a_budget_and_not_those_that_were_met(tmp_path: Path) -> None:
    rows = [(step, 3, step % 2) for step in range(20)]
    path = write_route(tmp_path / "t.csv", rows=rows)
    options = ReadOptions(shape=shape_of_counts(dict.fromkeys(range(2, 6), 4), 10))
    policies = ["layer", "layer+lfu"]
    facts = simulate([path], budgets=[40, 80], policies=policies, options=options)
    rates = {policy: [o.decode_hit_rate for o in one] for policy, one in by_policy(facts).items()}
    assert rates == {"layer": [0, 0.9], "layer+lfu": [0, 0.9]}


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    rows = "".join(f"{step},0,0,0,{step % 3}\n" for step in range(9))
    path.write_text(f"decode_call,token_in_call,layer,occurrence,experts\n{rows}")
    facts = simulate([str(path)], options=ReadOptions(shape=shape_of_counts({0: 4}, 9)))
    assert facts.unknown
    assert f"not known: {', '.join(facts.unknown)}" in str(simulation_text.text(facts))


def test_the_text_and_the_picture_say_what_was_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write_route(tmp_path / "t.csv")
    options = ReadOptions(shape=shape_of_counts({3: 4, 5: 4}, 1 << 20))
    facts = simulate([path], budgets=["50%", "100%"], slots=[2], prefetch=1, options=options)
    text = str(simulation_text.text(facts))
    assert "20 tokens in 1 request, 20 of them decoded" in text
    assert "experts: 8.0 MiB; a decoded token uses 2.0 MiB" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("8.0 MiB"))
    rates = [o.decode_hit_rate for o in facts.results if o.budget_share == 1 and o.slots is None]
    assert line.split()[3:13] == ["–" if rate is None else f"{rate:.1%}" for rate in rates]
    assert "too short to tell experts apart" in text
    chart.hit_rates(facts, "a title", str(tmp_path / "t.svg"))
    assert (tmp_path / "t.svg").read_text().startswith("<?xml")
    none = replace(facts, step_length=None, curve=(CurvePoint(1 << 20, None, None, None),))
    assert "a decoded token uses –" in str(simulation_text.text(none))
    chart.hit_rates(none, "a title", str(tmp_path / "none.png"))
    assert (tmp_path / "none.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_what_the_call_returns(tmp_path: Path) -> None:
    lines = MODEL + "# layer=3 expert_bytes=9\n# layer=5 expert_bytes=9\n"
    path = write_route(tmp_path / "t.csv", lines)
    command = [sys.executable, "-m", "moepack", "simulate", path]
    words = ["--json", "--budgets", "18B,50%", "--slots", "1,2", "--policies", "lru,layer+lfu"]
    done = subprocess.run([*command, *words], capture_output=True, check=True)
    printed = json.loads(done.stdout)
    facts = simulate([path], budgets=["18B", "50%"], slots=[1, 2], policies=["lru", "layer+lfu"])
    assert printed["results"] == [asdict(one) for one in facts.results]
    assert len(printed["results"]) == 6
    for wrong in (["--slots", "9" * 5000], ["--budgets", "x"], ["--policies", "mru"]):
        refused = subprocess.run([*command, *wrong], capture_output=True, text=True, check=False)
        assert refused.returncode == 2, refused.stderr
        assert "mistake" not in refused.stderr


SIZES = "".join(f"# layer={layer} expert_bytes={100 * (layer == 3)}\n" for layer in range(6))


def test_enough_is_the_least_that_hits_all_but_a_hundredth(tmp_path: Path) -> None:
    """One of 200 lookups, or two of them, come back so late that only all experts hit them."""
    for rare, enough in ((1, 200), (3, 400)):
        experts = [0, 1] * 150
        for number in range(rare):
            experts[60 * number + 20 : 60 * number + 20] = [2, 3]
        rows = [(step, 3, expert) for step, expert in enumerate(experts)]
        path = write_route(tmp_path / f"{rare}.csv", MODEL + SIZES, rows)
        facts = simulate([path], policies=["lru"])
        assert facts.enough_length == enough


def test_enough_holds_what_a_token_uses_in_any_layer(tmp_path: Path) -> None:
    sizes = SIZES.replace("layer=5 expert_bytes=0", "layer=5 expert_bytes=1000")
    rows = [*((step, 3, 0) for step in range(20)), (20, 5, 0)]
    path = write_route(tmp_path / "large.csv", MODEL + sizes, rows)
    assert simulate([path], policies=["lru"]).enough_length == 1000
    nothing = [(step, 3, step) for step in range(4)]
    path = write_route(tmp_path / "new.csv", MODEL + sizes, nothing)
    assert simulate([path], policies=["lru"]).enough_length is None, "nothing comes back"


def test_progress_counts_all_caches_and_ends_at_their_number(tmp_path: Path) -> None:
    done: list[int] = []

    def note(count: int, total: int) -> None:
        done.append(count)
        assert sum(done) <= total == len(simulation.POLICIES) * 2 + 2

    path = write_route(tmp_path / "t.csv")
    options = ReadOptions(shape=shape_of_counts({3: 4, 5: 4}, 1 << 20))
    simulate([path], budgets=["50%", "100%"], prefetch=1, options=options, progress=note)
    assert sum(done) == len(simulation.POLICIES) * 2 + 2
