"""Forecasts from end to end: of real models, on machines that are made up."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import RequestError, TraceError
from moepack.packing.pack_model import pack_model
from moepack.planning.footprint.model import footprint_of
from moepack.planning.forecasting.facts import ForecastFacts, SpeedFacts
from moepack.planning.forecasting.forecast import forecast
from moepack.planning.forecasting.modes import MARGIN, ExecutionMode, ModelOnMachine
from moepack.planning.machine.model import Machine
from moepack.report import plan_text
from tests.support import large_models
from tests.support.gguf_builder import moe
from tests.support.machines import GB, machine, surface
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_llama
from tests.support.values import some

Options = dict[str, Any]
CONTEXT = 256
MODEL = first_shard("qwen3moe")
TRACE = str(FIXTURES / "qwen3moe-trace.csv")
BOX = machine(vram=24, vram_bandwidth=936, bandwidth=40, drive=3)
WITHOUT_GPU = machine(bandwidth=40, drive=3)
HALF = 1 << 19
"""Bytes of half of the model's experts."""


@pytest.fixture(scope="module")
def model() -> ModelOnMachine:
    return ModelOnMachine(footprint_of(MODEL), BOX, CONTEXT)


@pytest.fixture(scope="module")
def experts_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pack of the model's experts alone."""
    pack = tmp_path_factory.mktemp("pack") / "model.moepack"
    pack_model(MODEL, pack, experts_only=True)
    return pack


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Qwen3-30B-A3B with its real dimensions, without its bytes."""
    return large_models.write("Qwen3-30B-A3B", tmp_path_factory.mktemp("large") / "model.gguf")


def forecast_of(box: Machine = BOX, path: Path = MODEL, **options: Any) -> ForecastFacts:
    return forecast(path, box, **{"context": CONTEXT, **options})


def only(box: Machine = BOX, path: Path = MODEL, **options: Any) -> SpeedFacts:
    (speed,) = forecast_of(box, path, **options).forecasts
    return speed


def speed_of(box: Machine = BOX, **options: Any) -> float:
    return some(only(box, **options).tokens_per_second)


def text_of(box: Machine, **options: Any) -> str:
    return str(plan_text.forecast(forecast_of(box, **options)))


STREAMED: Options = {"budget": HALF, "dense_in_memory": True}
MODES: dict[str, tuple[Machine, Options, str, list[str]]] = {
    "by itself": (BOX, {}, "gpu", ["vram"]),
    "whole in VRAM": (BOX, {"cpu_layer_count": 0}, "gpu", ["vram"]),
    "a layer in memory": (BOX, {"cpu_layer_count": 1}, "offload", ["vram", "memory"]),
    "from the drive": (BOX, STREAMED, "stream", ["waits", "memory", "drive"]),
    "from the drive, with a GPU": (
        BOX,
        {"budget": HALF},
        "gpu-stream",
        ["waits", "vram", "memory", "drive"],
    ),
    "without a GPU": (machine(bandwidth=40), {}, "cpu", ["memory"]),
}


@pytest.mark.parametrize(("box", "options", "kind", "names"), MODES.values(), ids=MODES)
def test_the_terms_of_each_mode_make_its_time(
    box: Machine, options: Options, kind: str, names: list[str]
) -> None:
    one = only(box, **options)
    assert (one.kind, [term.name for term in one.terms]) == (kind, ["layers", *names])
    seconds = {term.name: some(term.seconds) for term in one.terms}
    speed, ceiling = some(one.tokens_per_second), some(one.ceiling)
    assert one.reason is None
    assert 1 / speed == pytest.approx(sum(seconds.values()))
    assert 0 < some(one.lowest) < speed < some(one.highest) <= ceiling
    assert one.binding == max(seconds, key=lambda name: seconds[name])
    by_bytes = [term for term in one.terms if term.count is None]
    for term in by_bytes:
        assert term.basis == "typed"
        assert some(term.length) / some(term.reached) == pytest.approx(term.seconds, rel=1e-4)
        assert some(term.reached) < some(term.bandwidth)
    least = sum((term.length or 0) / (term.bandwidth or math.nan) for term in by_bytes)
    if one.misses_from is None:
        assert 1 / ceiling == pytest.approx(least)
    else:
        assert 1 / ceiling < least, "it may miss less than is likely"


def test_the_range_follows_from_the_evidence_of_misses() -> None:
    box = machine(bandwidth=400, drive=0.01)  # on which nothing else takes time
    ranges = []
    for traces, source in (((), "curve"), ([TRACE], "trace")):
        one = only(box, budget=HALF, traces=traces)
        assert one.misses_from == source
        speed = some(one.tokens_per_second)
        ranges.append((some(one.lowest) / speed, some(one.highest) / speed))
    typical, traced = ranges
    assert typical[1] > traced[1] * 1.2, "other texts may come back to experts more often"
    assert typical[0] < traced[0], "or less often"


def test_layers_that_wait_take_time_beside_what_they_read(model: ModelOnMachine) -> None:
    """With experts of 32 KiB: reading eight of them takes less than eight times as long as one."""
    drive = surface({(1 << 15, count): (speed, speed) for count, speed in ((1, 1), (8, 4))})
    one = only(machine(bandwidth=40)._replace(drive=drive), **STREAMED, traces=[TRACE])
    layers, waits, _, read = one.terms
    assert (layers.name, waits.name, read.name) == ("layers", "waits", "drive")
    assert 0 < some(waits.count) < some(layers.count)
    missed = some(one.missed_length) / some(model.step_length)
    assert some(waits.count) == pytest.approx(2 * (1 - (1 - missed) ** 4), rel=1e-4)
    step = drive.step(model.weights.expert_length // 32)
    assert step.wait > 0
    assert some(waits.seconds) == pytest.approx(some(waits.count) * step.wait)
    assert some(read.bandwidth) == pytest.approx(step.bandwidth.value)


def test_a_table_of_every_number_of_layers_in_memory() -> None:
    speeds = forecast_of(sweep=True).forecasts
    kinds = [(one.cpu_layer_count, one.kind) for one in speeds]
    assert kinds == [(0, "gpu"), (1, "offload"), (2, "offload")]
    rates = [some(one.tokens_per_second) for one in speeds]
    assert rates == sorted(rates, reverse=True)
    assert all(one.budget_length is None and one.misses_from is None for one in speeds)
    assert speeds[1] == only(cpu_layer_count=1)


def test_without_a_gpu_a_table_of_budgets(model: ModelOnMachine) -> None:
    speeds = forecast_of(WITHOUT_GPU, sweep=True).forecasts
    budgets = [some(one.budget_length) for one in speeds]
    assert len(budgets) == 12
    assert budgets == sorted(budgets)
    assert (budgets[0], budgets[-1]) == (model.step_length, model.weights.expert_length)
    missed = [some(one.missed_length) for one in speeds]
    assert missed == sorted(missed, reverse=True)
    assert missed[-1] == 0
    rates = [some(one.tokens_per_second) for one in speeds]
    assert rates == sorted(rates)
    assert speeds[3] == only(WITHOUT_GPU, budget=budgets[3])


UNKNOWN: dict[str, tuple[Machine, Options, str]] = {
    "vram": (machine(vram=24, bandwidth=40), {"cpu_layer_count": 1}, "VRAM"),
    "memory": (machine(vram=24, vram_bandwidth=936), {"cpu_layer_count": 1}, "memory"),
    "drive": (machine(bandwidth=40), {"budget": HALF}, "drive"),
    "all": (machine(), {"budget": HALF}, "memory and drive"),
}


@pytest.mark.parametrize(("box", "options", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_bandwidth_makes_no_speed(box: Machine, options: Options, words: str) -> None:
    one = only(box, **options)
    assert one.tokens_per_second is one.lowest is one.highest is one.ceiling is None
    assert one.reason == f"unknown: the bandwidth of {words}"
    assert one.binding is None
    assert one.fits is True
    text = text_of(box, **options)
    assert f": – tok/s: unknown: the bandwidth of {words}\n" in text
    assert "nine of ten" not in text
    for term in (term for term in one.terms if term.count is None):
        assert (term.bandwidth is None) == (term.seconds is None) == (term.reached is None)


def test_each_warning_has_its_condition(model: ModelOnMachine) -> None:
    step = some(model.step_length)
    unsteady, steady = (
        BOX._replace(drive=surface({(1 << 20, 4): (2.0, highest)})) for highest in (3.1, 2.9)
    )
    traced: Options = {"budget": HALF, "traces": [TRACE]}
    cases: list[tuple[Machine, Options, list[str]]] = [
        (BOX, {}, []),
        (BOX, traced, []),
        (BOX, {"budget": HALF}, ["without a trace"]),
        (BOX, {**traced, "budget": step}, []),
        (BOX, {**traced, "budget": step - 1}, ["the budget is less than"]),
        (steady, traced, []),
        (unsteady, traced, ["the drive was up to 1.6 times"]),
        (unsteady, {}, []),  # nothing is read of it
    ]
    for box, options, starts in cases:
        warnings = only(box, **options).warnings
        assert len(warnings) == len(starts), options
        assert all(map(str.startswith, warnings, starts))


def test_a_warning_if_vram_is_short(model: ModelOnMachine) -> None:
    part, whole = (some(model.needs(model.offload(count)))[0] for count in (1, 0))
    short = machine(vram=(whole - 1) / GB, vram_bandwidth=936, bandwidth=40)
    (warning,) = only(short, cpu_layer_count=0).warnings
    assert warning.startswith("takes 3.8 MiB of 3.8 MiB of VRAM: where a driver then uses memory")
    assert "least that fits" not in warning, "none leaves the margin"
    box = machine(vram=(part + MARGIN) / GB, vram_bandwidth=936, bandwidth=40)
    assert only(box, cpu_layer_count=0).warnings == (), "the margin alone is short"


def test_a_warning_if_memory_is_short(model: ModelOnMachine) -> None:
    exact = some(model.needs(ExecutionMode("cpu")))[1] + MARGIN
    for length, is_short in ((exact, False), (exact - 1, True)):
        box = machine(bandwidth=40, memory=length / GB, drive=3)
        streamed = only(box, budget=2 * HALF, traces=[TRACE])
        assert streamed.fits is not is_short
        assert len(streamed.warnings) == is_short
        assert all("it is swapped out, or killed" in line for line in streamed.warnings)


@needs_llama
def test_a_warning_if_the_file_is_nearly_as_long_as_memory(qwen3: Path) -> None:
    needed = some(only(machine(bandwidth=40, memory=999), qwen3).memory_length)
    for times, is_short in ((1.11, True), (1.12, False)):
        one = only(machine(bandwidth=40, memory=needed * times / GB), qwen3)
        assert (one.kind, one.fits) == ("cpu", True)
        assert len(one.warnings) == is_short
        assert all("read repeatedly" in line for line in one.warnings)


def test_a_pack_and_its_source_are_read_by_the_expert(packs: dict[str, Path]) -> None:
    pack = packs["qwen3moe"]
    assert speed_of(path=pack, cpu_layer_count=1) == speed_of(cpu_layer_count=1)
    box = BOX._replace(drive=surface({(1 << 15, 4): (1, 1), (3 << 15, 4): (2, 2)}))
    for path in (pack, MODEL):
        bandwidths = {term.name: term.bandwidth for term in only(box, path, budget=HALF).terms}
        assert bandwidths["drive"] == pytest.approx(GB, rel=0.05)


def test_of_a_pack_of_experts_alone_no_speed_is_known(experts_only: Path) -> None:
    for options in ({}, {"cpu_layer_count": 1}, {"budget": HALF}, {"sweep": True}):
        facts = forecast_of(path=experts_only, **options)
        assert facts.dense_length is facts.read_dense_length is facts.context_length is None
        assert facts.expert_length == 2 * HALF
        assert facts.next_receipt is None
        for one in facts.forecasts:
            assert one.reason == "the bytes that a token reads are unknown"
            for unknown in ("tokens_per_second", "ceiling", "binding", "fits", "vram_length"):
                assert getattr(one, unknown) is one.memory_length is None
        text = str(plan_text.forecast(facts))
        assert "the bytes that a token reads are unknown" in text
        assert " 0 B" not in text


def test_without_the_number_of_experts_used_no_speed_is_known(tmp_path: Path) -> None:
    builder = moe()
    builder.metadata = [pair for pair in builder.metadata if "expert_used" not in pair[0]]
    path = builder.write(tmp_path / "model.gguf")
    for options in ({}, {"budget": 1 << 20}, {"sweep": True}):
        facts = forecast_of(path=path, **options)
        assert facts.read_expert_length is None
        for one in facts.forecasts:
            assert one.tokens_per_second is one.hit_rate is one.missed_length is None
            assert one.terms == ()


def bench_run(folder: Path, name: str, **values: Any) -> str:
    """Write llama-bench's JSON of a run of the model."""
    length = footprint_of(MODEL).weights.length
    body: Options = {"backends": "CUDA", "model_size": length, "n_gpu_layers": 99}
    body |= {"n_prompt": 0, "n_gen": 128, "avg_ts": 3000.0, "n_cpu_moe": 0, **values}
    (folder / name).write_text(json.dumps([body]))
    return str(folder / name)


def own_run(folder: Path, name: str, **values: Any) -> str:
    """Write `moepack run --json` of a run of the model."""
    body: Options = {"model_length": footprint_of(MODEL).weights.length}
    body |= {"step_count": 100, "seconds": 0.1, "read_length": 1 << 24, "read_seconds": 0.05}
    body |= {"prompt_count": 4, "memory": {"experts": HALF}, **values}
    (folder / name).write_text(json.dumps(body))
    return str(folder / name)


def test_measured_runs_calibrate(tmp_path: Path) -> None:
    ends = [bench_run(tmp_path, f"{n}.json", n_cpu_moe=n, avg_ts=3000 - 100 * n) for n in (0, 2)]
    facts = forecast_of(sweep=True, receipts=ends)
    assert [one.refusal for one in facts.receipts] == [None, None]
    whole, between, most = facts.forecasts
    assert (whole.receipt_count, between.receipt_count) == (1, 2)
    assert whole.tokens_per_second == pytest.approx(3000, rel=0.02)
    assert most.tokens_per_second == pytest.approx(2800, rel=0.02)
    assert between.tokens_per_second == pytest.approx(2 / (1 / 3000 + 1 / 2800), rel=0.02)
    narrowed, plain = (
        some(one.highest) / some(one.lowest) for one in (between, only(cpu_layer_count=1))
    )
    assert narrowed < plain
    assert facts.next_receipt is None


def test_a_run_calibrates_its_own_mode_alone(tmp_path: Path) -> None:
    """But a run whole in VRAM is an end of those with experts in memory, beside one of them."""
    runs = {
        "gpu": bench_run(tmp_path, "gpu.json"),
        "offload": bench_run(tmp_path, "offload.json", n_cpu_moe=2),
        "cpu": bench_run(tmp_path, "cpu.json", n_gpu_layers=0),
        "stream": own_run(tmp_path, "stream.json"),
    }
    boxes = {"cpu": WITHOUT_GPU}
    options = {"gpu": {"cpu_layer_count": 0}, "offload": {"cpu_layer_count": 2}, "stream": STREAMED}
    for kind, run in itertools.product(runs, runs):
        facts = forecast_of(boxes.get(kind, BOX), **options.get(kind, {}), receipts=[runs[run]])
        assert (facts.forecasts[0].kind, facts.receipts[0].kind) == (kind, run)
        refusal = facts.receipts[0].refusal
        assert (refusal is None) == (kind == run)
        assert refusal is None or refusal.startswith("it ran in another mode (")
    both = [runs["gpu"], runs["offload"]]
    assert only(cpu_layer_count=2, receipts=both).receipt_count == 2
    assert only(cpu_layer_count=0, receipts=both).receipt_count == 1


def test_streaming_teaches_the_times_of_computing_and_of_the_drive(tmp_path: Path) -> None:
    """Of 6.6 ms for a token it waited 6 for a drive, which gave as much as is forecast."""
    box = machine(bandwidth=40, drive=0.006)
    missed = some(only(box, **STREAMED).missed_length)
    times = {"seconds": 0.66, "read_seconds": 0.6, "read_length": 100 * missed}
    one = only(box, **STREAMED, receipts=[own_run(tmp_path, "run.json", **times)])
    layers, waits, memory, drive = one.terms
    assert some(layers.seconds) + some(memory.seconds) == pytest.approx(0.0006, rel=0.1)
    assert some(waits.seconds) + some(drive.seconds) == pytest.approx(0.006, rel=0.15)


def test_measured_runs_replace_unknown_figures(tmp_path: Path) -> None:
    unknown = machine(vram=24)
    options: Options = {
        "cpu_layer_count": 1,
        "receipts": [bench_run(tmp_path, "part.json", n_cpu_moe=1)],
    }
    one = only(unknown, **options)
    assert one.tokens_per_second == pytest.approx(3000, rel=0.05)
    assert one.ceiling is None
    assert "at most" not in text_of(unknown, **options)


def test_a_run_of_another_model_is_an_error(model: ModelOnMachine, tmp_path: Path) -> None:
    """Versions of llama.cpp load a little more or less of the same one."""
    length = some(model.weights.length)
    for times in (0.985, 1.015):
        path = bench_run(tmp_path, "same.json", model_size=round(length * times))
        assert forecast_of(receipts=[path]).receipts
    for times in (0.97, 1.03, 1e6):
        path = bench_run(tmp_path, "other.json", model_size=round(length * times))
        with pytest.raises(RequestError, match="a receipt of another model") as caught:
            forecast_of(receipts=[path])
        assert (caught.value.path, caught.value.place) == (path, "entry 1")
        assert "1.3 MiB of tensors, as " in str(caught.value)


def test_a_run_that_is_not_used_comes_with_the_reason(tmp_path: Path, experts_only: Path) -> None:
    paths = [bench_run(tmp_path, "part.json", n_cpu_moe=1, n_gpu_layers=1)]
    facts = forecast_of(cpu_layer_count=1, receipts=paths)
    refusal = some(facts.receipts[0].refusal)
    assert refusal == "only 1 of 2 layers were on the GPU, with all their weights"
    assert f"not used: {refusal}" in str(plan_text.forecast(facts))
    assert facts.next_receipt is not None, "unused runs count for nothing"
    paths = [bench_run(tmp_path, "whole.json", n_cpu_moe=1)]
    facts = forecast_of(path=experts_only, cpu_layer_count=1, receipts=paths)
    assert facts.receipts[0].refusal == "the bytes that a token of this model reads are unknown"
    assert facts.forecasts[0].receipt_count == 0


def test_a_run_faster_than_the_bandwidths_is_not_used(tmp_path: Path) -> None:
    ceiling = some(only(cpu_layer_count=1).ceiling)
    for times, is_used in ((0.9, True), (1.5, False)):
        path = bench_run(tmp_path, f"{times}.json", n_cpu_moe=1, avg_ts=ceiling * times)
        facts = forecast_of(cpu_layer_count=1, receipts=[path])
        refusal = facts.receipts[0].refusal
        assert (refusal is None) == is_used
        assert facts.forecasts[0].receipt_count == is_used
        assert is_used or "bandwidths allow at most" in some(refusal)


BENCH = f"llama-bench -m {MODEL} -p 512 -n 128 -o json"
RUN = f'moepack run {MODEL} -p "…" -n 100'


def test_the_next_run_is_one_that_was_not_measured(tmp_path: Path) -> None:
    none, most = (bench_run(tmp_path, f"{n}.json", n_cpu_moe=n, avg_ts=2800) for n in (0, 2))
    first, second = f"{BENCH} -ngl 99 -ncmoe 2", f"{BENCH} -ngl 99 -ncmoe 0"
    for runs, command in (([], first), ([none], first), ([most], second), ([none, most], None)):
        assert forecast_of(sweep=True, receipts=runs).next_receipt == command
    assert forecast_of(cpu_layer_count=0).next_receipt == second
    assert forecast_of(cpu_layer_count=0, receipts=[none]).next_receipt is None
    assert forecast_of(WITHOUT_GPU).next_receipt == f"{BENCH} -ngl 0"
    assert forecast_of(**STREAMED).next_receipt == f"{RUN} --json > receipt.json"
    assert forecast_of(**STREAMED, receipts=[own_run(tmp_path, "run.json")]).next_receipt is None
    assert forecast_of(budget=HALF).next_receipt is None, "engines with a GPU say no reads"


BAD: dict[str, tuple[Machine, Options, str]] = {
    "no GPU": (machine(), {"cpu_layer_count": 1}, "cpu_layer_count: the machine has no GPU"),
    "two modes": (BOX, {"cpu_layer_count": 1, "sweep": True}, "either layers in memory, or"),
    "a short budget": (BOX, {"budget": 1 << 17}, "budget: .*at least 140.0 KiB, found 128.0 KiB"),
    "too deep": (BOX, {"depth": CONTEXT + 1}, "depth: .*up to 256, found 257"),
    "too little": (machine(memory=1), {}, "too little memory for this model"),
}


@pytest.mark.parametrize(("box", "options", "message"), BAD.values(), ids=BAD)
def test_impossible_options_are_refused(box: Machine, options: Options, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        forecast_of(box, **options)


def test_several_texts_share_what_they_read() -> None:
    """Each token of four texts is slower than one text's, and all together are faster."""
    for options in ({}, {"cpu_layer_count": 2}, STREAMED):
        one, four = (forecast_of(**options, texts=count) for count in (1, 4))
        assert (one.text_count, four.text_count) == (1, 4)
        alone, together = (some(facts.forecasts[0].tokens_per_second) for facts in (one, four))
        assert alone < together < 4 * alone
        missed = [facts.forecasts[0].missed_length for facts in (one, four)]
        assert missed[0] is None or some(missed[0]) < some(missed[1])
        assert some(four.forecasts[0].highest) <= some(four.forecasts[0].ceiling)
    with pytest.raises(RequestError, match="texts: no text"):
        forecast_of(texts=0)


def test_a_trace_of_another_model_is_refused() -> None:
    with pytest.raises(TraceError):
        forecast_of(path=first_shard("mixtral"), budget=1 << 20, traces=[TRACE])


def test_of_two_gpus_the_faster_makes_the_ceiling() -> None:
    slow, fast = (machine(vram=24, vram_bandwidth=speed, bandwidth=40) for speed in (360, 768))
    both = slow._replace(gpus=slow.gpus + fast.gpus)
    mixed, of_slow, of_fast = (only(box, cpu_layer_count=0) for box in (both, slow, fast))
    assert mixed.tokens_per_second == of_slow.tokens_per_second
    assert mixed.ceiling == of_fast.ceiling
    assert any("slowest GPU" in note for note in mixed.warnings)
    assert not of_slow.warnings
    twice = slow._replace(gpus=slow.gpus * 2)
    assert not only(twice, cpu_layer_count=0).warnings
