"""The time of prompts: passes, their reads and copies, and prompts that others measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from moepack.planning.footprint.model import footprint_of
from moepack.planning.forecasting.facts import PromptFacts, SpeedFacts
from moepack.planning.forecasting.forecast import forecast
from moepack.planning.forecasting.modes import MARGIN, ExecutionMode, ModelOnMachine
from moepack.planning.machine.model import Drive, Figure, Gpu, Machine
from tests.support import large_models
from tests.support.machines import GB
from tests.support.values import some

GB_OF_EXPERTS = 48
LAYERS, EXPERTS, USED = 48, 256, 8
LENGTH = GB_OF_EXPERTS * GB // (LAYERS * EXPERTS * 3)
CONTEXT = 1 << 15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with 48 GB of experts, of which a token uses 1.5 GB, without its bytes."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return large_models.write_plain(path, LAYERS, EXPERTS, USED, LENGTH, GB)


def box(
    *, drive: float | None = 4, compute: float | None = 1000, gpu: Gpu | None = None
) -> Machine:
    """Return a machine with bandwidths in GB/s, and processors of so many GFLOP/s."""
    return Machine(
        "box",
        Figure(96 * GB, "typed"),
        Figure(50 * GB, "measured"),
        () if gpu is None else (gpu,),
        None if drive is None else Drive(None, Figure(drive * GB, "typed")),
        None if compute is None else Figure(compute * GB, "measured"),
    )


GPU = Gpu("GPU", *[Figure(number * GB, "typed") for number in (24, 900, 30, 70_000)])  # type: ignore[arg-type]  # not is_unified


def speed(model: Path, machine: Machine, **options: Any) -> SpeedFacts:
    (one,) = forecast(model, machine, **{"context": CONTEXT, **options}).forecasts
    return one


def streamed(model: Path, machine: Machine, **options: Any) -> PromptFacts:
    """Forecast a prompt with experts from the drive through a cache of 2 GB."""
    options = {"budget": 2 * GB, "dense_in_memory": True, **options}
    return speed(model, machine, **options).prompt


def width(prompt: PromptFacts) -> float:
    return some(prompt.longest) / some(prompt.shortest)


def test_a_prompt_takes_as_many_passes_as_it_has_micro_batches(model: Path) -> None:
    one, four = (streamed(model, box(), prompt=2048, micro_batch=n) for n in (2048, 512))
    assert (one.pass_count, four.pass_count) == (1, 4)
    assert one.read_length == one.pass_length
    assert four.read_length == pytest.approx(4 * some(four.pass_length), abs=4)
    assert some(four.touched_share) < some(one.touched_share) < 1
    assert some(one.pass_length) / (GB_OF_EXPERTS * GB) == pytest.approx(one.touched_share, 0.01)
    assert some(one.seconds) < some(four.seconds)


def test_the_limit_is_the_drive_or_what_computes(model: Path) -> None:
    slow, fast = (streamed(model, box(drive=drive), prompt=2048) for drive in (1, 1000))
    assert (slow.binding, fast.binding) == ("drive", "computing")
    assert slow.limit == pytest.approx(2048 / (some(slow.read_length) / GB))
    assert some(slow.tokens_per_second) < some(slow.limit)
    slower = streamed(model, box(drive=1000, compute=500), prompt=2048)
    assert fast.limit == pytest.approx(2 * some(slower.limit))


def test_a_gpu_gets_experts_over_its_link_from_32_tokens_on(model: Path) -> None:
    few, many = (
        speed(model, box(gpu=GPU), cpu_layer_count=LAYERS, prompt=count).prompt
        for count in (31, 33)
    )
    assert (few.binding, many.binding) == ("computing", "link")
    assert (few.read_length, many.read_length) == (0, 0)
    half = GPU._replace(link=Figure(15 * GB, "typed"))
    slower = speed(model, box(gpu=half), cpu_layer_count=LAYERS, prompt=33).prompt
    assert some(slower.seconds) > 1.8 * some(many.seconds)


def test_a_cache_in_vram_brings_what_it_misses_over_the_link(model: Path) -> None:
    plain, cached = (
        speed(model, box(gpu=GPU), cpu_layer_count=LAYERS, vram_cache=length)
        for length in (None, 12 * GB)
    )
    assert plain.uploaded_length is None
    assert 0.7 < some(cached.vram_hit_rate) < 0.9, "a quarter of the experts"
    assert [term.name for term in cached.terms] == ["layers", "vram", "link"]
    assert some(cached.vram_length) == some(plain.vram_length) + 12 * GB
    assert some(cached.highest) > 1.2 * some(cached.tokens_per_second), "it may miss less"
    link = cached.terms[-1]
    assert link.length == cached.uploaded_length
    assert link.bandwidth == 30 * GB


def test_what_is_not_known_has_no_time(model: Path) -> None:
    no_drive = streamed(model, box(drive=None))
    assert (no_drive.seconds, no_drive.limit) == (None, None)
    assert no_drive.reason == "a bandwidth is unknown"
    dark = box(compute=None)._replace(memory_bandwidth=None)
    assert streamed(model, dark).reason == "the machine's compute speed is unknown"
    guessed = streamed(model, box(compute=None))
    assert guessed.seconds is not None
    measured = streamed(model, box(compute=500))
    assert width(guessed) > width(measured)


def test_micro_batches_shrink_where_there_is_no_room_for_them(gpt_oss: Path) -> None:
    """Logits and hidden layers take memory for each token of a micro-batch."""
    assert speed(gpt_oss, box(gpu=GPU), prompt=10_000).prompt.micro_batch == 4096
    explicit = speed(gpt_oss, box(gpu=GPU), prompt=10_000, micro_batch=100)
    assert explicit.prompt.micro_batch == 100
    model = ModelOnMachine(footprint_of(gpt_oss), box(gpu=GPU), CONTEXT)
    needed, _ = some(model.needs(ExecutionMode("offload", 36)))
    for memory, micro_batch in ((needed + MARGIN, 4096), (needed + MARGIN - 1, 2048)):
        tight = GPU._replace(memory=Figure(memory, "typed"))
        assert speed(gpt_oss, box(gpu=tight), prompt=10_000).prompt.micro_batch == micro_batch


def test_a_receipt_says_how_fast_prompts_are_computed(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    length = footprint_of(model).weights.length
    prompt = {"step_count": 100, "seconds": 30.0, "read_seconds": 10.0}
    body: dict[str, Any] = {
        "model_length": length,
        "step_count": 100,
        "seconds": 100.0,
        "misses": 1,
    }
    body |= {"read_length": 100 * GB, "read_seconds": 40.0}
    body |= {"prompt_count": 100, "memory": {"experts": 2 * GB}, "prompt": prompt}
    path.write_text(json.dumps(body))
    guessed, measured = (
        streamed(model, box(drive=1000), receipts=paths) for paths in ([], [str(path)])
    )
    assert measured.binding == "computing"
    assert measured.limit == pytest.approx(5)
    assert width(measured) < width(guessed)


PUBLISHED = [
    # Whallm: 289 GB of experts at 13 GB/s, layer by layer; computing as its longest prompt took.
    *((289, 6, 13, 160, count, seconds) for count, seconds in ((1024, 27), (4096, 34), (8192, 51))),
    # llama.cpp with experts by direct reads, on a GPU of 12 GB; the drive as the longest took.
    *((100, 8, 10.5, 5000, count, seconds) for count, seconds in ((80, 4.9), (412, 8.5))),
    # This model's own prototype, 2.9 GB, on two processors: 2,104 tokens.
    (2.9, 8, 1.2, 116, 2104, 22.9),
]
"""GB of experts, experts a token of 256, GB/s, tokens a second of computing, tokens, seconds."""


@pytest.mark.parametrize(("length", "used", "drive", "speed", "count", "seconds"), PUBLISHED)
def test_published_prompts_are_within_the_range(
    length: float, used: int, drive: float, speed: float, count: int, seconds: float, tmp_path: Path
) -> None:
    """With the stated speed of the drive, and of computing by the rest of the run."""
    expert = int(length * GB) // (LAYERS * EXPERTS * 3)
    path = large_models.write_plain(tmp_path / "m.gguf", LAYERS, EXPERTS, used, expert, 1 << 20)
    active = LAYERS * used * 3 * expert + (1 << 20)
    compute = Figure(speed * 2 * active / 0.6, "measured")
    machine = box(drive=drive)._replace(compute=compute, memory_bandwidth=Figure(1e13, "measured"))
    one = streamed(path, machine, prompt=count, micro_batch=count, budget=int(length * GB / 4))
    assert some(one.shortest) < seconds < some(one.longest)
    assert one.seconds == pytest.approx(seconds, rel=0.35)
