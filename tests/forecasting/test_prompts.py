"""How long prompts take: passes, what they read and copy, and prompts that others measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from moepack.footprint.weights import weights_of
from moepack.forecasting.facts import PromptFacts, SpeedFacts
from moepack.forecasting.forecast import forecast
from moepack.forecasting.ways import MARGIN, Model, Way
from moepack.machine.model import Drive, Figure, Gpu, Machine
from tests.support import large_models, published_runs
from tests.support.machines import GB

GB_OF_EXPERTS = 48
LAYERS, EXPERTS, USED = 48, 256, 8
LENGTH = GB_OF_EXPERTS * GB // (LAYERS * EXPERTS * 3)
CONTEXT = 1 << 15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with 48 GB of experts, of which a token uses 1.5 GB, without its bytes."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return published_runs.write_model(path, LAYERS, EXPERTS, USED, LENGTH, GB)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return gpt-oss-120b with its real dimensions, which say what it takes to compute."""
    return large_models.write("gpt-oss-120b", tmp_path_factory.mktemp("large") / "model.gguf")


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


GPU = Gpu(
    *("GPU", Figure(24 * GB, "typed"), Figure(900 * GB, "typed")),
    *(Figure(30 * GB, "typed"), Figure(70_000 * GB, "typed")),
)


def speed(model: Path, machine: Machine, **options: Any) -> SpeedFacts:
    (found,) = forecast(model, machine, **{"context": CONTEXT, **options}).forecasts
    return found


def streamed(model: Path, machine: Machine, **options: Any) -> PromptFacts:
    """Forecast a prompt with experts from the drive through a cache of 2 GB."""
    options = {"budget": 2 * GB, "dense_in_memory": True, **options}
    return speed(model, machine, **options).prompt


def test_a_prompt_takes_as_many_passes_as_it_has_micro_batches(model: Path) -> None:
    one, four = (streamed(model, box(), prompt=2048, micro_batch=n) for n in (2048, 512))
    assert (one.pass_count, four.pass_count) == (1, 4)
    assert one.read_length == one.pass_length
    assert four.read_length == pytest.approx(4 * (four.pass_length or 0), abs=4)
    assert (four.touched_share or 0) < (one.touched_share or 0) < 1
    assert (one.pass_length or 0) / (GB_OF_EXPERTS * GB) == pytest.approx(one.touched_share, 0.01)
    assert (one.seconds or 0) < (four.seconds or 0)


def test_the_limit_is_the_drive_or_what_computes(model: Path) -> None:
    slow, fast = (streamed(model, box(drive=drive), prompt=2048) for drive in (1, 1000))
    assert (slow.binding, fast.binding) == ("drive", "computing")
    assert slow.limit == pytest.approx(2048 / ((slow.read_length or 0) / GB))
    assert (slow.tokens_per_second or 0) < (slow.limit or 0)
    slower = streamed(model, box(drive=1000, compute=500), prompt=2048)
    assert fast.limit == pytest.approx(2 * (slower.limit or 0))


def test_a_range_lies_around_the_likely_time(model: Path) -> None:
    for options in ({"prompt": 16}, {"prompt": 1000}, {"prompt": 30_000}):
        one = streamed(model, box(), **options)
        assert 0 < (one.shortest or 0) < (one.seconds or 0) < (one.longest or 0)
        assert (one.longest or 0) < 100 * (one.shortest or 0)
        assert one.tokens_per_second == pytest.approx(options["prompt"] / (one.seconds or 1))


def test_what_stays_in_the_cache_is_read_once(model: Path) -> None:
    whole = streamed(model, box(), prompt=4096, micro_batch=512, budget=GB_OF_EXPERTS * GB)
    assert (whole.read_length or 0) <= GB_OF_EXPERTS * GB
    part = streamed(model, box(), prompt=4096, micro_batch=512)
    assert (part.read_length or 0) > 3 * GB_OF_EXPERTS * GB


def test_a_gpu_gets_experts_over_its_link_from_32_tokens_on(model: Path) -> None:
    few, many = (
        speed(model, box(gpu=GPU), cpu_layer_count=LAYERS, prompt=count).prompt
        for count in (31, 33)
    )
    assert (few.binding, many.binding) == ("computing", "link")
    assert (few.read_length, many.read_length) == (0, 0)
    half = GPU._replace(link=Figure(15 * GB, "typed"))
    slower = speed(model, box(gpu=half), cpu_layer_count=LAYERS, prompt=33).prompt
    assert (slower.seconds or 0) > 1.8 * (many.seconds or 0)


def test_experts_that_vram_holds_are_not_read(gpt_oss: Path) -> None:
    all_of_them, half = (
        speed(gpt_oss, box(gpu=GPU), cpu_layer_count=count, budget=4 * GB, prompt=2048)
        for count in (36, 18)
    )
    assert half.prompt.pass_length == pytest.approx((all_of_them.prompt.pass_length or 0) / 2, 0.01)
    assert (half.missed_length or 0) < (all_of_them.missed_length or 0) / 2
    assert half.memory_length == all_of_them.memory_length


def test_a_cache_in_vram_brings_what_it_misses_over_the_link(model: Path) -> None:
    plain, cached = (
        speed(model, box(gpu=GPU), cpu_layer_count=LAYERS, vram_cache=length)
        for length in (None, 12 * GB)
    )
    assert plain.uploaded_length is None
    assert cached.vram_hit_rate == pytest.approx(0.25)
    assert [term.name for term in cached.terms] == ["layers", "vram", "link"]
    assert (cached.vram_length or 0) == (plain.vram_length or 0) + 12 * GB
    assert (cached.highest or 0) > 5 * (cached.tokens_per_second or 0), "as routers come back"
    link = cached.terms[-1]
    assert link.length == cached.uploaded_length
    assert link.bandwidth == 30 * GB


def test_what_is_not_known_has_no_time(model: Path) -> None:
    no_drive = streamed(model, box(drive=None))
    assert (no_drive.seconds, no_drive.limit) == (None, None)
    assert no_drive.reason == "nothing is known of a bandwidth"
    dark = box(compute=None)._replace(memory_bandwidth=None)
    assert streamed(model, dark).reason == "nothing is known of how fast the machine computes"
    guessed = streamed(model, box(compute=None))
    assert guessed.seconds is not None
    known = streamed(model, box(compute=500))
    assert (guessed.longest or 0) / (guessed.shortest or 1) > (known.longest or 0) / (
        known.shortest or 1
    )


def test_micro_batches_shrink_where_there_is_no_room_for_them(gpt_oss: Path) -> None:
    """Logits and hidden layers take memory for each token of a micro-batch."""
    assert speed(gpt_oss, box(gpu=GPU), prompt=10_000).prompt.micro_batch == 4096
    asked = speed(gpt_oss, box(gpu=GPU), prompt=10_000, micro_batch=100)
    assert asked.prompt.micro_batch == 100
    needed = Model(gpt_oss, CONTEXT).needs(Way("offload", 36)).vram or 0
    for memory, micro_batch in ((needed + MARGIN, 4096), (needed + MARGIN - 1, 2048)):
        tight = GPU._replace(memory=Figure(memory, "typed"))
        assert speed(gpt_oss, box(gpu=tight), prompt=10_000).prompt.micro_batch == micro_batch


def test_long_prompts_take_longer_to_attend_to(gpt_oss: Path) -> None:
    """But for windows: half of the layers of gpt-oss look back on 128 tokens."""
    known = Model(gpt_oss, CONTEXT)
    counted = known.weights.parameters
    assert counted is not None
    assert counted.active is not None
    short, long = (known.prompt_operations(count) or 0 for count in (1, 16384))
    assert short == pytest.approx(2 * counted.active, rel=0.01)
    attending = long - 2 * counted.active * 16384
    full, windowed = 18 * 16384**2 / 2, 18 * 16384 * 128
    assert attending == pytest.approx(4 * 64 * 64 * (full + windowed))


def test_a_receipt_says_how_fast_prompts_are_computed(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    length = weights_of(model).length
    prompt = {"step_count": 100, "seconds": 30.0, "read_seconds": 10.0}
    path.write_text(
        json.dumps(
            {
                **{"model_length": length, "step_count": 100, "seconds": 100.0, "misses": 1},
                **{"read_length": 100 * GB, "read_seconds": 40.0, "prefetched": 0},
                **{"prompt_count": 100, "memory": {"experts": 2 * GB}, "prompt": prompt},
            }
        )
    )
    guessed, known = (
        streamed(model, box(drive=1000), receipts=paths) for paths in ([], [str(path)])
    )
    assert known.binding == "computing"
    assert known.limit == pytest.approx(5)
    assert (known.longest or 0) / (known.shortest or 1) < (guessed.longest or 0) / (
        guessed.shortest or 1
    )


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
    """Of the drive what is stated, of computing what the rest of the run needed."""
    expert = int(length * GB) // (LAYERS * EXPERTS * 3)
    path = published_runs.write_model(tmp_path / "m.gguf", LAYERS, EXPERTS, used, expert, 1 << 20)
    active = LAYERS * used * 3 * expert + (1 << 20)
    compute = Figure(speed * 2 * active / 0.6, "measured")
    machine = box(drive=drive)._replace(compute=compute, memory_bandwidth=Figure(1e13, "measured"))
    one = streamed(path, machine, prompt=count, micro_batch=count, budget=int(length * GB / 4))
    assert (one.shortest or 0) < seconds < (one.longest or 0)
    assert one.seconds == pytest.approx(seconds, rel=0.35)
