"""Placements: sums, the smallest N, the options of engines, floors."""

import shlex
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import RequestError, TraceError
from moepack.common.shape import ROUTED_FAMILY, ExpertKey, FamilyShape, ModelShape
from moepack.common.sizes import size_text
from moepack.planning.footprint.context import LLAMA_SERVER, MOEPACK_RUN, ContextOptions
from moepack.planning.footprint.model import footprint_of
from moepack.planning.placing.facts import DeviceFacts, OptionFacts, PlacementFacts
from moepack.planning.placing.offload import PlacementRequest
from moepack.planning.placing.pins import held_out_coverage, judge, pins_by_trace
from moepack.traces.formats.reading import read_trace
from moepack.traces.hotness.model import HeldOut, Hotness
from tests.support import large_models, llama_cpp_memory
from tests.support.gguf_builder import F32, moe
from tests.support.machines import GB, machine
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_llama
from tests.support.values import some

CONTEXT = 32768
QWEN3MOE = first_shard("qwen3moe")
TRACE, HOTNESS = (FIXTURES / f"qwen3moe-{name}.csv" for name in ("trace", "hotness"))
GIB = 1 << 30


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return DeepSeek-V3, without experts in its first three layers."""
    return large_models.write("DeepSeek-V3", tmp_path_factory.mktemp("large") / "model.gguf")


def lengths(
    path: Path, vram: int = 0, context: int = CONTEXT, server: ContextOptions = LLAMA_SERVER
) -> PlacementRequest:
    """Return the bytes of a model, and a GPU of `vram` bytes without a margin."""
    options, box = server._replace(token_count=context), machine(vram=vram / GB)
    return PlacementRequest(footprint_of(path), options, box, "llama.cpp", 0)


def value(option: OptionFacts, name: str) -> str | None:
    words = shlex.split(option.command)
    return words[words.index(name) + 1] if name in words else None


def place(
    path: Path, memory: int = 1 << 40, vram: Sequence[int] = (), **options: Any
) -> PlacementFacts:
    """Place a model in a terabyte of memory, with the micro-batches of `lengths`."""
    box = moepack.describe_machine(memory=memory, vram=vram)
    return moepack.place(path, box, **{"micro_batch": 512, **options})


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("name", ["Gemma-4-26B-A4B", "Qwen3-Next-80B-A3B"])
def test_the_context_is_what_llama_server_takes(name: str, tmp_path: Path) -> None:
    """It has four sequences that share all cells; each has a window and a state of its own."""
    path = large_models.write(name, tmp_path / "m.gguf")
    options = {"n_ctx": CONTEXT, "n_seq_max": 4, "kv_unified": True, "swa_full": False}
    length = llama_cpp_memory.memory_of(path, **options).context
    for vram in ([], [1 << 40], [1 << 36] * 3):
        devices = place(path, vram=vram, context=CONTEXT).devices
        assert sum(device.context_length for device in devices) == length


@needs_llama
@pytest.mark.long
def test_ik_llama_cpp_keeps_all_tokens_in_windows_too(gpt_oss: Path) -> None:
    options = {"n_ctx": CONTEXT, "swa_full": True}
    (device,) = place(gpt_oss, engine="ik_llama.cpp", context=CONTEXT).devices
    assert device.context_length == llama_cpp_memory.memory_of(gpt_oss, **options).context


@pytest.mark.parametrize("context", [4096, 131072])
def test_a_forecast_and_a_placement_of_a_pack_agree_on_what_it_takes(
    gpt_oss: Path, context: int
) -> None:
    facts = place(gpt_oss, engine="pack", memory=48 * GIB, context=context)
    (device,) = facts.devices
    box = machine(memory=48, bandwidth=80, drive=7)
    budget = facts.option.memory_expert_length
    batch = facts.option.micro_batch
    (speed,) = moepack.forecast(
        gpt_oss, box, budget=budget, context=context, micro_batch=batch
    ).forecasts
    assert speed.memory_length == device.length - device.left_length


MIXES = [
    [24 * GIB],
    [16 * GIB, 24 * GIB],
    [12 * GIB] * 3,
    [24 * GIB, 8 * GIB, 80 * GIB],
    [80 * GIB, 8 * GIB, 24 * GIB],
    [1 * GIB, 80 * GIB],
    [6 * GIB, 0, 24 * GIB],
    [2 * GIB],
    [0],
]
"""GPUs of more than one kind; the last two are too small for dense weights."""


@pytest.mark.parametrize("vram", MIXES)
def test_everything_lies_somewhere_and_nothing_twice(gpt_oss: Path, vram: list[int]) -> None:
    facts = place(gpt_oss, vram=vram)
    whole = lengths(gpt_oss)
    dense_length = sum(one.dense_length for one in facts.devices)
    assert dense_length == whole.weights.dense_length, "the output is not tied"
    assert sum(one.expert_length for one in facts.devices) == whole.expert_length
    contexts = sum(whole.context_lengths.values())
    assert sum(one.context_length for one in facts.devices) == contexts
    for _, length, *used, left in map(astuple, facts.devices):
        assert sum(used) + left == length
        assert left >= facts.margin_length or not sum(used)
    option = facts.option
    assert option.vram_expert_length + option.memory_expert_length == whole.expert_length


def test_gpus_are_filled_to_the_same_share(gpt_oss: Path) -> None:
    facts = place(gpt_oss, vram=[24 * GIB, 8 * GIB, 80 * GIB])
    assert facts.option.cpu_layer_count == 0
    gpus, whole = facts.devices[:-1], lengths(gpt_oss)
    rooms = [gpu.length - facts.margin_length for gpu in gpus]
    used = [gpu.length - gpu.left_length for gpu in gpus]
    most = max(length / room for length, room in zip(used, rooms, strict=True))
    step = max(whole.fixed_length_of(one) + one.expert_length for one in whole.layers)
    for length, room in zip(used[:-1], rooms, strict=False):
        assert length + max(step, whole.output_length) > (most - 0.001) * room


@pytest.mark.parametrize("vram", [[1 * GIB], [0], [512 << 20, 512 << 20], [3 * GIB]])
def test_without_vram_worth_using_all_is_in_memory(gpt_oss: Path, vram: list[int]) -> None:
    facts = place(gpt_oss, vram=vram, memory=64 * GIB)
    whole = lengths(gpt_oss)
    assert value(facts.option, "-ngl") == "0"
    assert facts.option.cpu_layer_count is None
    assert facts.option.memory_expert_length == whole.expert_length
    *gpus, memory = facts.devices
    assert [gpu.left_length for gpu in gpus] == vram
    assert memory.expert_length == whole.expert_length
    (note,) = facts.notes
    assert "VRAM lacks" in note
    assert not facts.alternatives


def test_n_is_the_smallest_that_fits(gpt_oss: Path) -> None:
    facts = place(gpt_oss, vram=[24 * GIB])
    gpu = facts.devices[0]
    layer = lengths(gpt_oss).layers[0].expert_length
    assert gpu.left_length - facts.margin_length < layer, "one more would fit"
    count = facts.option.cpu_layer_count
    assert value(facts.option, "--n-cpu-moe") == str(count)
    assert facts.option.memory_expert_length == some(count) * layer
    note = place(gpt_oss, vram=[24 * GIB, 8 * GIB]).notes[0]
    assert note.endswith("that has to be GPU 0 (24.0 GiB), GPU 1 (8.0 GiB)")
    assert not any("-ts" in note for note in facts.notes), "of one GPU there is no order"


def test_blocks_without_experts_are_counted(deepseek: Path) -> None:
    whole = lengths(deepseek)
    sparse = [layer for layer in whole.layers if layer.expert_length]
    assert [layer.layer for layer in sparse][:1] == [3]
    facts = place(deepseek, vram=[40 * GIB])
    count = some(facts.option.cpu_layer_count)
    in_memory = sum(layer.expert_length for layer in whole.layers if layer.layer < count)
    assert facts.option.memory_expert_length == in_memory
    assert facts.option.vram_expert_length == whole.expert_length - in_memory > 0


def llama_cpp_deals(shares: Sequence[int], layer_count: int) -> list[int]:
    """Return the GPU of each layer and of the output, by llama.cpp's rule for `-ts`."""
    total, ends = 0.0, []
    for share in shares:
        total += share
        ends.append(total)
    ends = [end / total for end in ends]
    return [bisect_right(ends, item / (layer_count + 1)) for item in range(layer_count + 1)]


@pytest.mark.parametrize("vram", [vram for vram in MIXES if len(vram) > 1])
def test_several_gpus_get_what_they_hold(gpt_oss: Path, vram: list[int]) -> None:
    facts = place(gpt_oss, vram=vram)
    whole = lengths(gpt_oss)
    shares = [int(share) for share in (value(facts.option, "-ts") or "").split(",")]
    assert len(shares) == len(vram)
    gpus = llama_cpp_deals(shares, len(whole.layers))
    for number, device in enumerate(facts.devices[:-1]):
        layers = [one for one, gpu in zip(whole.layers, gpus[:-1], strict=True) if gpu == number]
        assert device.context_length == sum(whole.context_lengths[one.layer] for one in layers)
        output = whole.output_length if gpus[-1] == number else 0
        assert device.dense_length == sum(some(one.dense_length) for one in layers) + output


def test_latest_experts_may_be_cached_in_vram(gpt_oss: Path) -> None:
    facts = place(gpt_oss, vram=[24 * GIB])
    cached = next(one for one in facts.alternatives if "--moe-cache-mib" in one.command)
    room = int(value(cached, "--moe-cache-mib") or 0) << 20
    whole = lengths(gpt_oss)
    working = (
        whole.fixed_length
        + whole.compute_length
        + whole.weights.staged_length
        + facts.margin_length
    )
    assert 0 <= 24 * GIB - working - room < 1 << 20
    assert cached.vram_expert_length == room
    assert cached.memory_expert_length == whole.expert_length
    assert any("--moe-cache-mib" in note and "b11480" in note for note in facts.notes)
    other = place(gpt_oss, vram=[24 * GIB], engine="ik_llama.cpp")
    lines = [*(one.command for one in other.alternatives), *other.notes]
    assert not any("--moe-cache-mib" in line for line in lines), "it has none"


def test_below_the_floor_it_says_what_is_missing(gpt_oss: Path) -> None:
    whole = lengths(gpt_oss)
    working = whole.compute_length + whole.weights.staged_length
    enough = whole.fixed_length + working + GIB
    assert place(gpt_oss, vram=[enough]).option.cpu_layer_count == 36
    (note,) = place(gpt_oss, vram=[enough - (2 << 20)]).notes
    assert "VRAM lacks 2.0 MiB beside the margin" in note
    # Two that have the room together, but the output fits into neither beside what is before it.
    half = (enough - GIB - working) // 2 + whole.compute_length + GIB
    (note,) = place(gpt_oss, vram=[half + whole.weights.staged_length, half]).notes
    assert f"VRAM lacks {size_text(whole.output_length)} beside the margin" in note
    with pytest.raises(RequestError, match="too little VRAM") as caught:
        place(gpt_oss, vram=[enough - (2 << 20)], memory=48 * GIB)
    assert (caught.value.hint or "").startswith("2.0 MiB are missing")
    with pytest.raises(RequestError, match="too little memory") as caught:
        place(gpt_oss, vram=[24 * GIB], memory=32 * GIB)
    assert "`engine=pack`" in (caught.value.hint or "")


def test_a_pack_is_run_with_what_there_is(gpt_oss: Path) -> None:
    facts = place(gpt_oss, engine="pack", memory=32 * GIB)
    (device,) = facts.devices
    assert device.left_length == facts.margin_length
    option = facts.option
    assert option.memory_expert_length == device.expert_length
    assert option.memory_expert_length + option.streamed_length == lengths(gpt_oss).expert_length
    assert value(option, "--memory") == f"{device.expert_length >> 20}MiB"
    whole = place(gpt_oss, engine="pack", memory=128 * GIB)
    assert (whole.option.streamed_length, value(whole.option, "--memory")) == (0, None)
    needed = device.dense_length + device.context_length + device.compute_length
    floor = needed + lengths(gpt_oss).floor + GIB
    least = place(gpt_oss, engine="pack", memory=floor).option
    assert least.memory_expert_length == lengths(gpt_oss).floor
    with pytest.raises(RequestError, match="too little memory") as caught:
        place(gpt_oss, engine="pack", memory=floor - (1 << 20))
    assert (caught.value.hint or "").startswith("1.0 MiB are missing")


def test_hotness_decides_whether_experts_are_pinned() -> None:
    source, trace = QWEN3MOE, TRACE
    whole = lengths(source, context=64, server=MOEPACK_RUN)
    fixed = place(source, engine="pack", context=64).devices[0]
    working = fixed.dense_length + fixed.context_length + fixed.compute_length
    memory = working + whole.floor + 1000
    options: dict[str, Any] = {"engine": "pack", "context": 64, "margin": 0, "memory": memory}
    by_trace = some(place(source, **options, traces=[str(trace)]).pins)
    static, lru = some(by_trace.static_hit_rate), some(by_trace.lrfu_hit_rate)
    is_worth_it = by_trace.verdict == "static" and lru <= static - 0.05
    assert bool(by_trace.pin_length) == is_worth_it
    by_hotness = some(place(source, **options, hotness=str(HOTNESS)).pins)
    assert by_hotness.lrfu_hit_rate is None, "counts do not tell the order"


def test_a_forecast_comes_with_a_machine(gpt_oss: Path) -> None:
    box = machine(memory=64, bandwidth=80, vram=24, vram_bandwidth=936)
    facts = moepack.place(gpt_oss, box, context=8192)
    first, cached = some(facts.option.forecast), some(facts.alternatives[-1].forecast)
    assert first.cpu_layer_count == facts.option.cpu_layer_count
    assert first.tokens_per_second is not None
    assert cached.vram_cache_length == facts.alternatives[-1].vram_cache_length
    assert cached.uploaded_length
    assert place(gpt_oss).option.forecast is None


@pytest.fixture
def three_tiers(gpt_oss: Path) -> PlacementFacts:
    box = machine(memory=32, bandwidth=80, drive=7, vram=24, vram_bandwidth=936)
    return moepack.place(gpt_oss, box, engine="pack")


def test_vram_memory_and_drive_are_one_plan(gpt_oss: Path, three_tiers: PlacementFacts) -> None:
    """Experts in VRAM for good need no memory, and no byte is there twice."""
    gpu, memory = three_tiers.devices
    option, whole = three_tiers.option, lengths(gpt_oss)
    assert option.vram_expert_length == gpu.expert_length
    assert option.memory_expert_length == memory.expert_length
    assert option.streamed_length > 0
    assert whole.expert_length == (
        option.vram_expert_length + option.memory_expert_length + option.streamed_length
    )
    kept = sum(
        one.expert_length for one in whole.layers if one.layer < (option.cpu_layer_count or 0)
    )
    assert option.vram_expert_length == whole.expert_length - kept
    assert memory.dense_length == whole.embedding_length, "the rest is on the GPU"
    command = shlex.split(option.command)
    assert command[:2] == ["moepack", "run"]
    server = command[command.index("--") + 1 :]
    assert server[:3] == ["llama-server", "-m", "{}"]
    assert server[server.index("--n-cpu-moe") + 1] == str(option.cpu_layer_count)
    assert server[server.index("-ub") + 1] == str(option.micro_batch) == "4096"


def test_the_forecast_of_three_tiers_knows_them_all(three_tiers: PlacementFacts) -> None:
    option, speed = three_tiers.option, some(three_tiers.option.forecast)
    assert (speed.kind, speed.fits) == ("gpu-stream", True)
    assert speed.budget_length == option.memory_expert_length
    assert speed.cpu_layer_count == option.cpu_layer_count
    gpu, memory = three_tiers.devices
    assert speed.vram_length == gpu.length - gpu.left_length
    assert speed.memory_length == memory.length - memory.left_length
    assert [one.cpu_layer_count for one in three_tiers.alternatives] == [36, None]
    cached, plain = (some(one.forecast) for one in three_tiers.alternatives)
    assert plain.kind == "stream", "which leaves the GPU alone"
    # A cache in VRAM keeps a second copy of experts in memory; whole layers do not.
    assert some(cached.missed_length) > some(speed.missed_length)
    assert some(speed.tokens_per_second) > some(cached.tokens_per_second)


@pytest.mark.parametrize(
    ("vram", "engine", "micro_batch"),
    [
        ([128], "llama.cpp", 512),
        ([24], "llama.cpp", 4096),
        ([6], "llama.cpp", 2048),
        ([], "llama.cpp", 512),
        ([], "pack", 2048),
        ([24], "pack", 4096),
    ],
)
def test_prompts_come_in_as_large_a_batch_as_pays(
    gpt_oss: Path, vram: list[int], engine: str, micro_batch: int
) -> None:
    """As many tokens as there is room for where experts come from elsewhere."""
    gpus = [length * GIB for length in vram]
    facts = place(gpt_oss, vram=gpus, engine=engine, micro_batch=None, context=8192)
    assert facts.option.micro_batch == micro_batch
    batch = value(facts.option, "-ub")
    assert batch == (None if micro_batch == 512 else str(micro_batch))


def test_row_tables_stay_on_the_drive(tmp_path: Path) -> None:
    def device(*tables: str) -> DeviceFacts:
        builder = moe()
        keys = ("embedding_length", "attention.head_count", "attention.head_count_kv")
        for key, number in zip(keys, (64, 1, 1), strict=True):
            builder.put(f"qwen3moe.{key}", "u32", number)
        for name in tables:
            builder.tensor(name, (64, 1000), F32, 4 * 64)
        path = builder.write(tmp_path / "model.gguf")
        facts = place(path, context=256, engine="pack")
        assert facts.table_length == len(tables) * 4 * 64 * 1000
        return facts.devices[0]

    plain = device()
    assert device("per_layer_token_embd.weight", "blk.1.engram_embd.weight") == plain


def test_a_pack_is_run_by_its_own_command(packs: dict[str, Path]) -> None:
    facts = place(packs["qwen3moe"], context=64, margin=0, memory=16 << 20)
    assert facts.engine == "pack"
    assert shlex.split(facts.option.command)[:3] == ["moepack", "run", str(packs["qwen3moe"])]
    with pytest.raises(RequestError, match="reads GGUF, not packs"):
        place(packs["qwen3moe"], engine="llama.cpp")


def test_by_default_the_context_is_no_longer_than_the_model_was_trained_for() -> None:
    assert place(QWEN3MOE, memory=8 * GIB).context == 2048
    assert place(QWEN3MOE, memory=8 * GIB, context=4096).context == 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "vllm"}, "no such engine, expected llama.cpp, ik_llama.cpp, pack"),
        ({"margin": -1}, "margin: not a size"),
        ({"traces": ["x"]}, "places whole layers"),
        ({"engine": "pack", "traces": ["x"], "hotness": "y"}, "either traces or hotness"),
        ({"cache_types": ("f16", "q9")}, "not a type for a cache"),
    ],
)
def test_impossible_requests_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        place(QWEN3MOE, **options)


def test_a_model_that_is_not_known_well_enough_is_refused(gpt_oss: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="far less of the experts"):
        place(gpt_oss, engine="pack", memory=32 * GIB, traces=[str(TRACE)])
    pack = tmp_path / "model.moepack"
    moepack.pack_model(QWEN3MOE, pack, experts_only=True)
    with pytest.raises(RequestError, match="memory that the model needs is unknown"):
        place(pack)


# Whether single experts are worth pinning.

SHAPE = ModelShape((FamilyShape(0, ROUTED_FAMILY, 4, 10, 2),))


@pytest.mark.parametrize(
    ("verdict", "static", "lrfu", "is_worth_it"),
    [
        ("static", 0.6, 0.3, True),
        ("static", None, None, True),
        ("static", 0.6, 0.56, False),
        ("static", 0.3, 0.6, False),
        ("recency", 0.6, 0.3, False),
        ("unknown", None, None, False),
    ],
)
def test_the_gate_and_lrfu_decide(
    verdict: str, static: float | None, lrfu: float | None, is_worth_it: bool
) -> None:
    pins = judge(verdict, "why", static, lrfu, 100)
    assert pins.pin_length == (100 if is_worth_it else 0)
    assert (pins.static_hit_rate, pins.lrfu_hit_rate) == (static, lrfu)
    assert judge(verdict, "why", static, lrfu, -5).pin_length == 0


def hotness(counts: tuple[int, ...], held_out: tuple[int, ...] | None) -> Hotness:
    def by_expert(numbers: tuple[int, ...]) -> dict[ExpertKey, int]:
        return {ExpertKey(0, expert): count for expert, count in enumerate(numbers)}

    half = None if held_out is None else HeldOut("time", 10, by_expert(held_out))
    return Hotness("hot.csv", by_expert(counts), 20, 0, held_out=half)


def test_what_is_ranked_is_not_what_is_measured() -> None:
    """Learned are 1, 7, 2 and 0; the hottest two are 1 and 2, which have 3 of 8 held out."""
    measured = hotness((1, 8, 4, 5), (0, 1, 2, 5))
    assert held_out_coverage(measured, SHAPE, 20) == 3 / 8
    assert held_out_coverage(measured, SHAPE, 19) == 1 / 8
    assert held_out_coverage(measured, SHAPE, 9) == 0
    assert held_out_coverage(measured, SHAPE, 40) == 1


def test_experts_of_other_layers_take_no_room_from_those_that_are_cached() -> None:
    shape = footprint_of(first_shard("qwen3moe")).weights.shape
    budget = shape.routed_length // 4
    with read_trace(FIXTURES / "qwen3moe-trace.csv", model=shape) as trace:
        whole, part = (pins_by_trace(trace, budget, 0, layers) for layers in ((0, 1), (0,)))
    assert (part.lrfu_hit_rate or 0) > (whole.lrfu_hit_rate or 0)
