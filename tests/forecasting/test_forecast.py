"""Forecasts from end to end: of real models, on machines that are made up."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moepack.errors import RequestError
from moepack.forecasting.facts import ForecastFacts, SpeedFacts
from moepack.forecasting.forecast import forecast
from moepack.forecasting.misses import WorkingSet
from moepack.forecasting.ways import MARGIN, Model, Way
from moepack.format import manifest
from moepack.machine.model import Figure, Machine
from moepack.packing.pack_model import pack_model
from moepack.report import forecast_text
from tests.support import large_models
from tests.support.gguf_builder import moe
from tests.support.machines import GB, machine, surface
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_llama

CONTEXT = 256
MODEL = first_shard("qwen3moe")
TRACE = str(FIXTURES / "qwen3moe-trace.csv")
BOX = machine(vram=24, vram_bandwidth=936, bandwidth=40, drive=3)
HALF = 1 << 19
"""Bytes of half of the model's experts."""


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(MODEL, CONTEXT)


def forecast_of(box: Machine = BOX, path: Path = MODEL, **options: Any) -> ForecastFacts:
    return forecast(path, box, **{"context": CONTEXT, **options})


def only(box: Machine = BOX, path: Path = MODEL, **options: Any) -> SpeedFacts:
    (found,) = forecast_of(box, path, **options).forecasts
    return found


def speed_of(box: Machine = BOX, **options: Any) -> float:
    speed = only(box, **options).tokens_per_second
    assert speed is not None
    return speed


KNOWN = WorkingSet(20, 4)

WAYS: dict[str, tuple[Machine, dict[str, Any], str, list[str]]] = {
    "by itself": (BOX, {}, "gpu", ["layers", "vram"]),
    "whole in VRAM": (BOX, {"cpu_layer_count": 0}, "gpu", ["layers", "vram"]),
    "a layer in memory": (BOX, {"cpu_layer_count": 1}, "offload", ["layers", "vram", "memory"]),
    "from the drive": (
        BOX,
        {"budget": HALF, "dense_in_memory": True},
        "stream",
        ["layers", "memory", "drive"],
    ),
    "from the drive, with a GPU": (
        BOX,
        {"budget": HALF},
        "gpu-stream",
        ["layers", "vram", "memory", "drive"],
    ),
    "without a GPU": (machine(bandwidth=40), {}, "cpu", ["layers", "memory"]),
}


@pytest.mark.parametrize(("box", "options", "kind", "names"), WAYS.values(), ids=WAYS)
def test_the_terms_of_each_way_make_its_time(
    box: Machine, options: dict[str, Any], kind: str, names: list[str]
) -> None:
    one = only(box, **options)
    assert (one.kind, [term.name for term in one.terms]) == (kind, names)
    seconds = {term.name: term.seconds or 0.0 for term in one.terms}
    speed, lowest, highest, ceiling = (
        one.tokens_per_second,
        one.lowest,
        one.highest,
        one.ceiling,
    )
    assert speed is not None
    assert lowest is not None
    assert highest is not None
    assert ceiling is not None
    assert one.reason is None
    assert 1 / speed == pytest.approx(sum(seconds.values()))
    assert 0 < lowest < speed < highest <= ceiling
    assert one.binding == max(seconds, key=lambda name: seconds[name])
    for term in one.terms[1:]:
        assert term.basis == "typed"
        assert term.length is not None
        assert term.reached is not None
        assert term.bandwidth is not None
        assert term.length / term.reached == pytest.approx(term.seconds)
        assert term.reached < term.bandwidth
    least = sum((term.length or 0) / (term.bandwidth or math.nan) for term in one.terms[1:])
    if one.misses_from is None:
        assert 1 / ceiling == pytest.approx(least)
    else:
        assert 1 / ceiling < least, "it may miss less than is likely"


def test_the_range_knows_how_sure_misses_are() -> None:
    box = machine(bandwidth=400, drive=0.01)  # on which nothing else takes time

    def range_of(**known: Any) -> tuple[float, float]:
        one = only(box, budget=HALF, **known)
        assert one.tokens_per_second is not None
        return (one.lowest or 0) / one.tokens_per_second, (one.highest or 0) / one.tokens_per_second

    router, formula, traced = range_of(), range_of(working_set=KNOWN), range_of(traces=[TRACE])
    assert router[1] > traced[1] * 2, "real routers come back to experts"
    assert router[0] > traced[0], "and miss no more than even ones"
    assert formula[0] < traced[0], "which says too little"


def test_a_short_trace_is_called_so(tmp_path: Path) -> None:
    short = tmp_path / "short.csv"
    short.write_text("".join(Path(TRACE).read_text().splitlines(keepends=True)[:60]))
    box = machine(bandwidth=40, drive=3)
    notes = only(box, budget=HALF, traces=[str(short)]).warnings
    assert notes[-1].startswith("the trace is too short")
    assert only(box, budget=HALF, traces=[TRACE]).warnings == ()


def test_a_table_of_every_number_of_layers_in_memory() -> None:
    found = forecast_of(sweep=True).forecasts
    assert [one.cpu_layer_count for one in found] == [0, 1, 2]
    assert [one.kind for one in found] == ["gpu", "offload", "offload"]
    speeds = [one.tokens_per_second or 0 for one in found]
    assert speeds == sorted(speeds, reverse=True)
    assert all(one.budget_length is None and one.misses_from is None for one in found)
    assert found[1] == only(cpu_layer_count=1)


def test_without_a_gpu_a_table_of_budgets(model: Model) -> None:
    box = machine(bandwidth=40, drive=3)
    found = forecast_of(box, sweep=True).forecasts
    budgets = [one.budget_length or 0 for one in found]
    assert len(budgets) == 12
    assert budgets == sorted(budgets)
    assert (budgets[0], budgets[-1]) == (model.step_length, model.weights.expert_length)
    missed = [one.missed_length or 0 for one in found]
    assert missed == sorted(missed, reverse=True)
    assert missed[-1] == 0
    speeds = [one.tokens_per_second or 0 for one in found]
    assert speeds == sorted(speeds)
    assert found[3] == only(box, budget=budgets[3])


UNKNOWN: dict[str, tuple[Machine, dict[str, Any], str]] = {
    "vram": (machine(vram=24, bandwidth=40), {"cpu_layer_count": 1}, "VRAM"),
    "memory": (machine(vram=24, vram_bandwidth=936), {"cpu_layer_count": 1}, "memory"),
    "drive": (machine(bandwidth=40), {"budget": HALF}, "drive"),
    "all": (machine(), {"budget": HALF}, "memory and drive"),
}


@pytest.mark.parametrize(("box", "options", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_bandwidth_that_is_not_known_makes_no_speed(
    box: Machine, options: dict[str, Any], words: str
) -> None:
    facts = forecast_of(box, **options)
    (one,) = facts.forecasts
    assert one.tokens_per_second is one.lowest is one.highest is one.ceiling is None
    assert one.reason == f"nothing is known of the bandwidth of {words}"
    assert one.binding is None
    assert one.fits is True
    text = str(forecast_text.text(facts))
    assert f": – tok/s: nothing is known of the bandwidth of {words}\n" in text
    assert "nine of ten" not in text
    for term in one.terms[1:]:
        assert (term.bandwidth is None) == (term.seconds is None) == (term.reached is None)


def test_what_is_not_needed_need_not_be_known() -> None:
    assert speed_of(machine(vram=24, vram_bandwidth=936), cpu_layer_count=0) > 0
    whole = forecast_of(machine(bandwidth=40), budget=2 * HALF).forecasts[0]
    assert whole.missed_length == 0
    assert whole.tokens_per_second is not None


def test_a_table_says_why_it_has_no_speeds() -> None:
    facts = forecast_of(machine(vram=24, vram_bandwidth=936), sweep=True)
    assert [one.tokens_per_second is None for one in facts.forecasts] == [False, True, True]
    text = str(forecast_text.text(facts))
    assert "note: no speeds where nothing is known of the bandwidth of memory\n" in text
    everywhere = str(forecast_text.text(forecast_of(machine(bandwidth=40, drive=3), sweep=True)))
    assert everywhere.count("an even router is assumed") == 1


def words_of(box: Machine, **options: Any) -> list[str]:
    """Return the warnings of one forecast, each by its beginning."""
    known = {
        "takes": "room",
        "the budget": "budget",
        "the formula": "formula",
        "without a trace": "router",
        "the drive": "drive",
    }
    warnings = only(box, **options).warnings
    return [
        next(word for start, word in known.items() if one.startswith(start)) for one in warnings
    ]


def test_each_warning_has_its_condition(model: Model) -> None:
    streamed: dict[str, Any] = {"budget": HALF, "traces": [TRACE]}
    assert words_of(BOX) == []
    assert words_of(BOX, **streamed) == []
    assert words_of(BOX, budget=HALF) == ["router"]
    assert words_of(BOX, budget=HALF, working_set=WorkingSet(20, 4)) == ["formula"]
    step = model.step_length
    assert step is not None
    assert words_of(BOX, budget=step, traces=[TRACE]) == []
    assert words_of(BOX, budget=step - 1, traces=[TRACE]) == ["budget"]
    for ends, expected in (((2.0, 2.9), []), ((2.0, 3.1), ["drive"])):
        drive = surface({(1 << 20, 4): ends})
        assert words_of(BOX._replace(drive=drive), **streamed) == expected
        assert words_of(BOX._replace(drive=drive)) == [], "nothing is read of it"


def test_a_warning_where_vram_is_short(model: Model) -> None:
    some = model.needs(model.offload(1)).vram
    whole = model.needs(model.offload(0)).vram
    assert some is not None
    assert whole is not None
    short = machine(vram=(whole - 1) / GB, vram_bandwidth=936, bandwidth=40)
    (warning,) = only(short, cpu_layer_count=0).warnings
    assert warning.startswith("takes 3.5 MiB of 3.5 MiB of VRAM: where a driver then uses memory")
    assert "least that fits" not in warning, "none leaves the margin"
    box = machine(vram=(some + MARGIN) / GB, vram_bandwidth=936, bandwidth=40)
    assert only(box, cpu_layer_count=0).warnings == (), "the margin alone is short"


@needs_llama
def test_the_least_number_of_layers_that_fits_is_named(tmp_path: Path) -> None:
    path = large_models.write("Qwen3-30B-A3B", tmp_path / "model.gguf")
    box = machine(vram=12, vram_bandwidth=936, bandwidth=40)
    (warning,) = only(box, path, cpu_layer_count=0).warnings
    best = only(box, path)
    assert warning.endswith(f"; `cpu_layer_count={best.cpu_layer_count}` is the least that fits")
    assert best.fits is True
    assert best.warnings == ()
    assert only(box, path, cpu_layer_count=(best.cpu_layer_count or 0) - 1).fits is False


def test_a_warning_where_memory_is_short(model: Model) -> None:
    needed = model.needs(Way("cpu")).memory
    assert needed is not None
    exact = needed + MARGIN
    for length, is_short in ((exact, False), (exact - 1, True)):
        box = machine(bandwidth=40, memory=length / GB, drive=3)
        streamed = only(box, budget=2 * HALF, traces=[TRACE])
        assert streamed.fits is not is_short
        assert len(streamed.warnings) == is_short
        assert all("it is swapped out, or killed" in line for line in streamed.warnings)


@needs_llama
def test_a_warning_where_the_file_is_nearly_as_long_as_memory(tmp_path: Path) -> None:
    path = large_models.write("Qwen3-30B-A3B", tmp_path / "model.gguf")
    needed = Model(path, CONTEXT).needs(Way("cpu")).memory
    assert needed is not None
    for times, is_short in ((1.11, True), (1.12, False)):
        one = only(machine(bandwidth=40, memory=needed * times / GB), path)
        assert (one.kind, one.fits) == ("cpu", True)
        assert len(one.warnings) == is_short
        assert all("read again and again" in line for line in one.warnings)


@needs_llama
def test_a_table_of_what_does_not_fit_beside_a_gpu_is_one_of_budgets(tmp_path: Path) -> None:
    path = large_models.write("MiMo-V2-Flash", tmp_path / "model.gguf")
    box = machine(memory=128, vram=24, vram_bandwidth=936, bandwidth=80, drive=7)
    found = forecast_of(box, path, sweep=True).forecasts
    assert {one.kind for one in found} == {"gpu-stream"}
    assert {one.fits for one in found} == {True, False}
    assert forecast_of(box, sweep=True).forecasts[0].kind == "gpu"


def test_a_cache_takes_no_more_than_all_experts(model: Model) -> None:
    whole = model.needs(Way("cpu")).memory
    one = only(budget=1 << 40, dense_in_memory=True)
    assert (one.memory_length, one.missed_length) == (whole, 0)


def test_misses_come_from_the_best_that_is_known() -> None:
    router, formula, traced = (
        only(budget=HALF, **known) for known in ({}, {"working_set": KNOWN}, {"traces": [TRACE]})
    )
    sources = [one.misses_from for one in (router, formula, traced)]
    assert sources == ["even router", "working set", "trace"]
    assert router.hit_rate == 0.5
    assert len({one.missed_length for one in (router, formula, traced)}) == 3
    by_batch = only(budget=HALF, traces=[TRACE], micro_batch=1)
    assert by_batch.missed_length is not None


@pytest.mark.parametrize("options", [{"cpu_layer_count": 1}, {"budget": HALF}, {}])
def test_deeper_is_slower(options: dict[str, Any]) -> None:
    speeds = [speed_of(**options, depth=depth) for depth in (0, CONTEXT // 2, CONTEXT)]
    assert speeds == sorted(speeds, reverse=True)
    assert len(set(speeds)) == 3


def test_a_pack_is_read_by_the_blob(tmp_path: Path, model: Model) -> None:
    pack = tmp_path / "model.moepack"
    pack_model(MODEL, pack)
    assert speed_of(path=pack, cpu_layer_count=1) == speed_of(cpu_layer_count=1)
    slice_length = model.read_length
    drive = surface({(slice_length, 4): (1, 1), (3 * slice_length, 4): (2, 2)})
    box = BOX._replace(drive=drive)
    of_pack, of_source = (
        {term.name: term.bandwidth for term in only(box, path, budget=HALF).terms}
        for path in (pack, MODEL)
    )
    assert of_pack["drive"] == pytest.approx(2 * GB)
    assert of_source["drive"] == pytest.approx(GB)


def test_of_a_pack_of_experts_alone_no_speed_is_known(tmp_path: Path) -> None:
    pack = tmp_path / "model.moepack"
    pack_model(MODEL, pack, experts_only=True)
    for options in ({}, {"cpu_layer_count": 1}, {"budget": HALF}, {"sweep": True}):
        facts = forecast_of(path=pack, **options)
        assert facts.dense_length is facts.read_dense_length is facts.context_length is None
        assert facts.expert_length == 2 * HALF
        assert facts.next_receipt is None
        for one in facts.forecasts:
            assert one.tokens_per_second is one.ceiling is None
            assert one.reason == "it is not known what a token reads"
            assert one.binding is None
            assert one.fits is None
            assert one.vram_length is one.memory_length is None
        text = str(forecast_text.text(facts))
        assert "it is not known what a token reads" in text
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


def test_a_pack_that_uses_no_expert_divides_nothing_by_nothing(tmp_path: Path) -> None:
    pack = tmp_path / "model.moepack"
    pack_model(moe().write(tmp_path / "model.gguf"), pack, experts_only=True)
    path = pack / manifest.NAME
    described = manifest.decode(path.read_bytes(), str(path))
    source = described.source._replace(experts_used={"ffn_exps": 0})
    path.write_bytes(manifest.encode(described._replace(source=source)))
    one = only(path=pack, budget=1 << 10, working_set=WorkingSet(2, 1))
    assert (one.missed_length, one.hit_rate) == (0, None)


def test_what_cannot_fit_is_not_chosen_though_not_all_is_known(tmp_path: Path) -> None:
    pack = tmp_path / "model.moepack"
    pack_model(MODEL, pack, experts_only=True)
    tight = (HALF + MARGIN) / GB
    assert only(machine(vram=24), pack).kind == "gpu"
    assert only(machine(vram=MARGIN / GB), pack).kind == "offload"
    assert only(machine(memory=24), pack).kind == "cpu"
    one = only(machine(memory=tight), pack)
    assert (one.kind, one.budget_length) == ("stream", HALF)


def receipt(folder: Path, name: str, **values: Any) -> str:
    """Write what llama-bench says of a run of the model."""
    length = Model(MODEL, CONTEXT).weights.length
    body: dict[str, Any] = {"backends": "CUDA", "model_size": length, "n_gpu_layers": 99}
    body |= {"n_prompt": 0, "n_gen": 128, "avg_ts": 3000.0, "n_cpu_moe": 0, **values}
    (folder / name).write_text(json.dumps([body]))
    return str(folder / name)


def run_receipt(folder: Path, name: str, **values: Any) -> str:
    """Write what `moepack run --json` says of a run of the model."""
    body: dict[str, Any] = {"model_length": Model(MODEL, CONTEXT).weights.length}
    body |= {"step_count": 100, "seconds": 0.1, "read_length": 1 << 24, "read_seconds": 0.05}
    body |= {"prompt_count": 4, "memory": {"experts": HALF}, **values}
    (folder / name).write_text(json.dumps(body))
    return str(folder / name)


def test_receipts_calibrate(tmp_path: Path) -> None:
    ends = [receipt(tmp_path, f"{n}.json", n_cpu_moe=n, avg_ts=3000 - 100 * n) for n in (0, 2)]
    facts = forecast_of(sweep=True, receipts=ends)
    assert [one.refusal for one in facts.receipts] == [None, None]
    whole, between, most = facts.forecasts
    assert (whole.receipt_count, between.receipt_count) == (1, 2)
    assert whole.tokens_per_second == pytest.approx(3000, rel=0.02)
    assert most.tokens_per_second == pytest.approx(2800, rel=0.02)
    assert between.tokens_per_second == pytest.approx(2 / (1 / 3000 + 1 / 2800), rel=0.02)
    plain = only(cpu_layer_count=1)
    for one in (between, plain):
        assert one.highest is not None
        assert one.lowest is not None
    assert (between.highest or 0) / (between.lowest or 1) < (plain.highest or 0) / (
        plain.lowest or 1
    )
    assert facts.next_receipt is None


def test_receipts_teach_what_no_figure_says(tmp_path: Path) -> None:
    unknown = machine(vram=24)
    paths = [receipt(tmp_path, "some.json", n_cpu_moe=1)]
    one = only(unknown, cpu_layer_count=1, receipts=paths)
    assert one.tokens_per_second == pytest.approx(3000, rel=0.05)
    assert one.ceiling is None
    text = str(forecast_text.text(forecast_of(unknown, cpu_layer_count=1, receipts=paths)))
    assert "at most" not in text


def test_a_receipt_of_another_model_is_an_error(tmp_path: Path) -> None:
    path = receipt(tmp_path, "other.json", model_size=10**9)
    with pytest.raises(RequestError, match="a receipt of another model.*found 953.7 MiB") as caught:
        forecast_of(receipts=[path])
    assert caught.value.path == path


def test_why_a_receipt_is_not_used(tmp_path: Path) -> None:
    paths = [receipt(tmp_path, "part.json", n_cpu_moe=1, n_gpu_layers=1)]
    facts = forecast_of(cpu_layer_count=1, receipts=paths)
    (judged,) = facts.receipts
    assert judged.refusal == "only 1 of 2 layers were on the GPU, with all their weights"
    assert f"not used: {judged.refusal}" in str(forecast_text.text(facts))
    assert facts.next_receipt is not None, "what is not used counts for nothing"


def test_a_receipt_of_a_model_of_which_too_little_is_known(tmp_path: Path) -> None:
    pack = tmp_path / "model.moepack"
    pack_model(MODEL, pack, experts_only=True)
    facts = forecast_of(
        path=pack, cpu_layer_count=1, receipts=[receipt(tmp_path, "r.json", n_cpu_moe=1)]
    )
    assert facts.receipts[0].refusal == "it is not known what a token reads of this model"
    assert facts.forecasts[0].receipt_count == 0


BENCH = f"llama-bench -m {MODEL} -p 512 -n 128 -o json"
RUN = f'moepack run {MODEL} -p "…" -n 100'


def test_the_next_receipt_for_experts_in_memory(tmp_path: Path) -> None:
    none, some, most = (
        receipt(tmp_path, f"{n}.json", n_cpu_moe=n, avg_ts=3000 - 100 * n) for n in range(3)
    )

    def following(*receipts: str, **options: Any) -> str | None:
        return forecast_of(receipts=receipts, **(options or {"cpu_layer_count": 1})).next_receipt

    first, second = f"{BENCH} -ngl 99 -ncmoe 2", f"{BENCH} -ngl 99 -ncmoe 0"
    assert following() == following(none) == following(some) == first
    assert following(most) == following(most, most) == second
    assert following(none, most) is following(some, most) is None
    assert following(sweep=True) == following(none, sweep=True) == first
    assert following(cpu_layer_count=0) == following(most, cpu_layer_count=0) == second
    assert following(none, cpu_layer_count=0) is None


def test_the_next_receipt_is_one_that_fits(model: Model) -> None:
    vram = model.needs(model.offload(1)).vram
    assert vram is not None
    box = machine(vram=(vram + MARGIN) / GB, vram_bandwidth=936, bandwidth=40)
    assert forecast_of(box, cpu_layer_count=0).next_receipt is None
    assert forecast_of(box, cpu_layer_count=1).next_receipt == f"{BENCH} -ngl 99 -ncmoe 2"
    nothing = machine(vram=MARGIN / GB, vram_bandwidth=936, bandwidth=40)
    assert forecast_of(nothing, cpu_layer_count=1).next_receipt is None


def test_the_next_receipt_without_a_gpu(tmp_path: Path) -> None:
    box = machine(bandwidth=40)
    assert forecast_of(box).next_receipt == f"{BENCH} -ngl 0"
    path = receipt(tmp_path, "cpu.json", n_gpu_layers=0)
    assert forecast_of(box, receipts=[path]).next_receipt is None


def test_the_next_receipt_from_the_drive(tmp_path: Path) -> None:
    one, two = (run_receipt(tmp_path, f"{n}.json", seconds=0.1 + n / 100) for n in range(2))

    def command(*receipts: str) -> str | None:
        return forecast_of(budget=HALF, dense_in_memory=True, receipts=receipts).next_receipt

    assert command() == f"{RUN} --memory floor --json > receipt-1.json"
    assert command(one) == f"{RUN} --memory floor --json > receipt-2.json", "the other end"
    memory = {"experts": HALF // 2, "floor": HALF // 4}
    floor = run_receipt(tmp_path, "floor.json", memory=memory)
    assert command(floor) == f"{RUN} --json > receipt-2.json"
    more = run_receipt(tmp_path, "more.json", memory={**memory, "experts": HALF // 2 + 1})
    assert command(more) == f"{RUN} --memory floor --json > receipt-2.json"
    assert command(one, two) is None


def test_nobody_says_what_an_engine_read_beside_a_gpu() -> None:
    assert forecast_of(budget=HALF).next_receipt is None


def test_llama_bench_is_given_no_pack(tmp_path: Path) -> None:
    pack = tmp_path / "a model.moepack"
    pack_model(MODEL, pack)
    command = forecast_of(path=pack).next_receipt
    assert command == "llama-bench -m MODEL.gguf -p 512 -n 128 -o json -ngl 99 -ncmoe 0"
    command = forecast_of(path=pack, budget=HALF, dense_in_memory=True).next_receipt
    assert command is not None
    assert command.startswith(f"moepack run '{pack}' ")


BAD: dict[str, tuple[Machine, dict[str, Any], str]] = {
    "no GPU": (machine(), {"cpu_layer_count": 1}, "cpu_layer_count: the machine has no GPU"),
    "two ways": (BOX, {"cpu_layer_count": 1, "sweep": True}, "either layers in memory, or"),
    "two sources": (
        BOX,
        {"budget": HALF, "traces": [TRACE], "working_set": WorkingSet(2, 1)},
        "either a trace or a working set",
    ),
    "less than a token uses": (
        BOX,
        {"budget": HALF, "working_set": WorkingSet(7, 1)},
        "working_set: .*U of 8 .* to 32, found 7",
    ),
    "more than there are": (
        BOX,
        {"budget": HALF, "working_set": WorkingSet(33, 1)},
        "working_set: .*U of 8 .* to 32, found 33",
    ),
    "a short budget": (BOX, {"budget": 1 << 17}, "budget: .*at least 140.0 KiB, found 128.0 KiB"),
    "too deep": (BOX, {"depth": CONTEXT + 1}, "depth: .*up to 256, found 257"),
    "too little": (machine(memory=1), {}, "too little memory for this model"),
}


@pytest.mark.parametrize(("box", "options", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused(box: Machine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        forecast_of(box, **options)


def test_a_working_set_without_a_cache_is_called_unused() -> None:
    for options in ({"cpu_layer_count": 1}, {"sweep": True}):
        for one in forecast_of(BOX, **options, working_set=WorkingSet(9, 1)).forecasts:
            assert one.warnings[-1].startswith("nothing is read of the drive here")
    (cached,) = forecast_of(BOX, budget=HALF, working_set=WorkingSet(9, 1)).forecasts
    assert not any("nothing is read" in warning for warning in cached.warnings)
    (plain,) = forecast_of(BOX, cpu_layer_count=1).forecasts
    assert not any("nothing is read" in warning for warning in plain.warnings)


def test_a_trace_of_another_model_is_refused() -> None:
    from moepack.errors import TraceError

    with pytest.raises(TraceError):
        forecast_of(path=first_shard("mixtral"), budget=1 << 20, traces=[TRACE])


def test_a_trace_with_fewer_experts_a_token_is_called_so(tmp_path: Path) -> None:
    lines = Path(TRACE).read_text().splitlines(keepends=True)
    trace = tmp_path / "first.csv"
    trace.write_text("".join(line for line in lines if line.split(",")[2] != "1"))
    notes = only(machine(bandwidth=40, drive=3), budget=HALF, traces=[str(trace)]).warnings
    assert any("uses 45 % of the experts that one of this model does" in note for note in notes)


def test_of_two_gpus_the_faster_makes_the_ceiling() -> None:
    slow, fast = (machine(vram=24, vram_bandwidth=speed, bandwidth=40) for speed in (360, 768))
    both = slow._replace(gpus=slow.gpus + fast.gpus)
    found, of_slow, of_fast = (only(box, cpu_layer_count=0) for box in (both, slow, fast))
    assert found.tokens_per_second == of_slow.tokens_per_second
    assert found.ceiling == of_fast.ceiling
    assert any("slowest GPU" in note for note in found.warnings)
    assert not of_slow.warnings
    twice = slow._replace(gpus=slow.gpus * 2)
    assert not only(twice, cpu_layer_count=0).warnings


def test_a_machine_comes_from_its_file_as_well(tmp_path: Path) -> None:
    from moepack.machine.file import toml_text

    path = tmp_path / "machine.toml"
    path.write_text(toml_text(BOX))
    assert forecast(MODEL, path, context=CONTEXT) == forecast_of()


def test_large_bandwidths_are_written_out() -> None:
    box = machine(vram=192, vram_bandwidth=5300)
    assert " of 4.8 TiB/s typed" in str(forecast_text.text(forecast_of(box)))
    measured = BOX._replace(memory_bandwidth=Figure(40e9, "measured", 39e9, 41e9))
    assert "37.3 GiB/s measured" in str(
        forecast_text.text(forecast_of(measured, cpu_layer_count=1))
    )


def test_a_receipt_faster_than_the_bandwidths_is_not_used(tmp_path: Path) -> None:
    ceiling = only(cpu_layer_count=1).ceiling
    assert ceiling is not None
    for times, is_used in ((0.9, True), (1.5, False)):
        path = receipt(tmp_path, f"{times}.json", n_cpu_moe=1, avg_ts=ceiling * times)
        facts = forecast_of(cpu_layer_count=1, receipts=[path])
        (judged,) = facts.receipts
        assert (judged.refusal is None) == is_used
        assert facts.forecasts[0].receipt_count == is_used
        if not is_used:
            assert "bandwidths allow at most" in (judged.refusal or "")
