"""What goes where: sums, the smallest N, the words of engines, floors."""

import re
import shlex
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.errors import RequestError, TraceError
from moepack.footprint.context import LLAMA_SERVER, MOEPACK_RUN
from moepack.placing.facts import DeviceFacts, OptionFacts, PlacementFacts
from moepack.placing.load import Load, load_of
from moepack.placing.offload import filled, offload, pattern
from moepack.report.facts import SourceFacts
from moepack.sizes import size_text
from moepack.source.experts import find_experts
from moepack.source.shards import open_source
from tests.support import large_models, llama_cpp_memory
from tests.support.gguf_builder import F32, moe
from tests.support.machines import machine
from tests.support.models import REAL_MODELS, first_shard
from tests.support.needs import needs_llama

CONTEXT = 32768
GIB = 1 << 30


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return gpt-oss-120b with its real dimensions, without its bytes."""
    return large_models.write("gpt-oss-120b", tmp_path_factory.mktemp("large") / "model.gguf")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return DeepSeek-V3, whose first three layers have no experts."""
    return large_models.write("DeepSeek-V3", tmp_path_factory.mktemp("large") / "model.gguf")


def load(path: Path) -> Load:
    return load_of(path, LLAMA_SERVER._replace(token_count=CONTEXT))


def value(option: OptionFacts, name: str) -> str | None:
    words = shlex.split(option.command)
    return words[words.index(name) + 1] if name in words else None


def place(path: Path, **options: Any) -> PlacementFacts:
    """Place a model in a terabyte of memory, with the micro-batches of `load`."""
    return moepack.place(path, **{"memory": 1 << 40, "micro_batch": 512, **options})


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt-oss-120b", "Gemma-4-26B-A4B", "Qwen3-Next-80B-A3B"])
def test_the_context_is_what_llama_server_takes(name: str, tmp_path: Path) -> None:
    """It has four sequences that share all cells; each has a window and a state of its own."""
    path = large_models.write(name, tmp_path / "m.gguf")
    options = {"n_ctx": CONTEXT, "n_seq_max": 4, "kv_unified": True, "swa_full": False}
    taken = llama_cpp_memory.memory_of(path, **options).context
    for vram in ([], [1 << 40], [1 << 36] * 3):
        devices = place(path, vram=vram, context=CONTEXT).devices
        assert sum(device.context_length for device in devices) == taken


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


def test_published_figures_come_out(gpt_oss: Path) -> None:
    """gpt-oss-120b: 114.7 B in experts, 5.1 B active, 1.5 B dense (its model card)."""
    counts = place(gpt_oss).parameters
    figures = (counts.total, counts.expert, counts.active, counts.dense)
    assert [round((figure or 0) / 1e9, 1) for figure in figures] == [116.8, 114.7, 5.1, 1.5]


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
"""GPUs of more than one kind; the last two have no room for what is no expert's."""


@pytest.mark.parametrize("model", [*REAL_MODELS])
def test_inspecting_counts_the_same_parameters(model: str) -> None:
    facts = moepack.inspect(first_shard(model))
    assert isinstance(facts, SourceFacts)
    assert facts.parameters == place(first_shard(model), context=64).parameters


@pytest.mark.parametrize("vram", MIXES)
def test_everything_lies_somewhere_and_nothing_twice(gpt_oss: Path, vram: list[int]) -> None:
    facts = place(gpt_oss, vram=vram)
    whole = load(gpt_oss)
    assert sum(one.dense_length for one in facts.devices) == (whole.weights.dense_length or 0), (
        "the output is not tied"
    )
    assert sum(one.expert_length for one in facts.devices) == whole.expert_length
    contexts = sum(layer.context_length for layer in whole.layers)
    assert sum(one.context_length for one in facts.devices) == contexts
    for device in facts.devices:
        lengths = (
            *(device.dense_length, device.context_length, device.expert_length),
            device.compute_length,
        )
        assert sum(lengths) + device.left_length == device.length
        assert device.left_length >= facts.margin_length or not sum(lengths)
    option = facts.option
    assert option.vram_expert_length + option.memory_expert_length == whole.expert_length


@pytest.mark.parametrize("model", ["gpt-oss-120b", "Qwen3-30B-A3B"])
@pytest.mark.parametrize(
    "vram", [[24 * GIB, 8 * GIB, 80 * GIB], [80 * GIB, 24 * GIB], [48 * GIB] * 4]
)
def test_gpus_are_filled_to_the_same_share(model: str, vram: list[int], tmp_path: Path) -> None:
    path = large_models.write(model, tmp_path / "m.gguf")
    facts = place(path, vram=vram)
    assert facts.option.cpu_layer_count == 0
    gpus = facts.devices[:-1]
    rooms = [gpu.length - facts.margin_length for gpu in gpus]
    used = [gpu.length - gpu.left_length for gpu in gpus]
    most = max(length / room for length, room in zip(used, rooms, strict=True))
    whole = load(path)
    step = max(layer.fixed_length + layer.expert_length for layer in whole.layers)
    for length, room in zip(used[:-1], rooms, strict=False):
        assert length + max(step, whole.output_length) > (most - 0.001) * room
    assert all(used), "none is left empty"


@pytest.mark.parametrize("vram", [[1 * GIB], [0], [512 << 20, 512 << 20], [3 * GIB]])
def test_without_vram_worth_using_all_is_in_memory(gpt_oss: Path, vram: list[int]) -> None:
    facts = place(gpt_oss, vram=vram, memory=64 * GIB)
    whole = load(gpt_oss)
    assert value(facts.option, "-ngl") == "0"
    assert facts.option.cpu_layer_count is None
    assert facts.option.memory_expert_length == whole.expert_length
    *gpus, memory = facts.devices
    assert [gpu.left_length for gpu in gpus] == vram
    assert memory.expert_length == whole.expert_length
    (note,) = facts.notes
    assert "VRAM lacks" in note
    assert not facts.alternatives


def test_what_is_placed_in_memory_is_forecast_there(gpt_oss: Path) -> None:
    # Together they would have room, if each of them needed none to compute in.
    box = machine(memory=80, bandwidth=80, vram=1.8, vram_bandwidth=936, gpu_count=4)
    speed = moepack.place(gpt_oss, box, context=8192).option.forecast
    assert speed is not None
    assert speed.kind == "cpu"


def test_which_gpu_is_which_is_said_where_there_are_several(gpt_oss: Path) -> None:
    (note,) = place(gpt_oss, vram=[24 * GIB, 8 * GIB]).notes
    assert note.endswith("that has to be GPU 0 (24.0 GiB), GPU 1 (8.0 GiB)")
    assert not place(gpt_oss, vram=[24 * GIB]).notes


def test_n_is_the_smallest_that_fits(gpt_oss: Path) -> None:
    facts = place(gpt_oss, vram=[24 * GIB])
    gpu = facts.devices[0]
    layer = load(gpt_oss).layers[0].expert_length
    assert gpu.left_length - facts.margin_length < layer, "one more would fit"
    count = facts.option.cpu_layer_count
    assert value(facts.option, "--n-cpu-moe") == str(count)
    assert facts.option.memory_expert_length == (count or 0) * layer


def test_blocks_without_experts_are_counted(deepseek: Path) -> None:
    whole = load(deepseek)
    sparse = [layer for layer in whole.layers if layer.expert_length]
    assert [layer.layer for layer in sparse][:1] == [3]
    facts = place(deepseek, vram=[40 * GIB])
    count = facts.option.cpu_layer_count
    assert count is not None
    in_memory = sum(layer.expert_length for layer in whole.layers if layer.layer < count)
    assert facts.option.memory_expert_length == in_memory
    assert facts.option.vram_expert_length == whole.expert_length - in_memory > 0


def test_what_fits_whole_needs_no_words(gpt_oss: Path) -> None:
    option = place(gpt_oss, vram=[80 * GIB]).option
    assert option.cpu_layer_count == 0
    assert "moe" not in option.command.replace(str(gpt_oss), "")
    assert option.memory_expert_length == 0


def test_without_a_gpu_all_is_in_memory(gpt_oss: Path) -> None:
    facts = place(gpt_oss)
    (device,) = facts.devices
    assert device.name == "memory"
    assert device.expert_length == load(gpt_oss).expert_length
    assert "-ngl" not in facts.option.command


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
    whole = load(gpt_oss)
    shares = [int(share) for share in (value(facts.option, "-ts") or "").split(",")]
    assert len(shares) == len(vram)
    gpus = llama_cpp_deals(shares, len(whole.layers))
    for number, device in enumerate(facts.devices[:-1]):
        held = [one for one, gpu in zip(whole.layers, gpus[:-1], strict=True) if gpu == number]
        assert device.context_length == sum(one.context_length for one in held)
        output = whole.output_length if gpus[-1] == number else 0
        assert device.dense_length == sum(one.dense_length for one in held) + output


def test_a_pattern_names_just_what_is_in_memory(deepseek: Path) -> None:
    whole = load(deepseek)
    room = 40 * GIB
    placed = offload(whole, [room])
    assert placed is not None
    fuller = filled(whole, placed, [room])
    assert 0 < len(fuller.in_memory) < len(placed.in_memory), "there is room for a projection"
    assert fuller.used_lengths[0] <= room
    moved = placed.memory_length - fuller.memory_length
    assert fuller.used_lengths[0] - placed.used_lengths[0] == moved > 0
    patterns = [item.removesuffix("=CPU") for item in pattern(fuller.in_memory).split(",")]
    names = find_experts(open_source([deepseek])).names
    matched = {name for name in names if any(re.search(one, name) for one in patterns)}
    wanted = {f"blk.{held.layer}.{held.name}.weight" for held in fuller.in_memory}
    assert matched == wanted


def test_a_pattern_is_offered_where_it_brings_enough(gpt_oss: Path) -> None:
    whole = load(gpt_oss)
    first = whole.layers[0]
    fixed = whole.fixed_length + whole.compute_length + whole.staged_length + GIB
    up, down = first.tensors[0].length, first.tensors[-1].length
    for extra, is_offered in ((up + down, True), (up, False)):
        facts = place(gpt_oss, vram=[fixed + first.expert_length + extra])
        assert facts.option.cpu_layer_count == 35
        offered = [one for one in facts.alternatives if value(one, "-ot") is not None]
        assert len(offered) == is_offered
        for option in offered:
            brought = option.vram_expert_length - facts.option.vram_expert_length
            assert brought >= 0.01 * whole.expert_length
            assert option.cpu_layer_count is None
            assert "--n-cpu-moe" not in option.command


def test_latest_experts_may_be_cached_in_vram(gpt_oss: Path) -> None:
    facts = place(gpt_oss, vram=[24 * GIB])
    cached = next(one for one in facts.alternatives if "--moe-cache-mib" in one.command)
    room = int(value(cached, "--moe-cache-mib") or 0) << 20
    whole = load(gpt_oss)
    taken = whole.fixed_length + whole.compute_length + whole.staged_length + facts.margin_length
    assert 0 <= 24 * GIB - taken - room < 1 << 20
    assert cached.vram_expert_length == room
    assert cached.memory_expert_length == whole.expert_length
    others = place(gpt_oss, vram=[24 * GIB], engine="ik_llama.cpp").alternatives
    assert not any("--moe-cache-mib" in one.command for one in others), "it has none"


def test_no_more_context_has_room_than_the_model_was_trained_for() -> None:
    trained = place(first_shard("qwen3moe"), memory=8 * GIB)
    assert trained.context == 2048
    assert place(first_shard("qwen3moe"), memory=8 * GIB, context=4096).context == 4096


def test_a_shorter_context_takes_less(gpt_oss: Path) -> None:
    long, short = (place(gpt_oss, vram=[24 * GIB], context=count) for count in (131072, 4096))
    assert (long.option.cpu_layer_count or 0) > (short.option.cpu_layer_count or 0)
    small = place(gpt_oss, vram=[24 * GIB], context=131072, cache_types=("q8_0", "q8_0"))
    assert small.devices[0].context_length < 0.6 * long.devices[0].context_length
    assert value(small.option, "-ctk") == "q8_0"


def test_below_the_floor_it_says_what_is_missing(gpt_oss: Path) -> None:
    whole = load(gpt_oss)
    working = whole.compute_length + whole.staged_length
    enough = whole.fixed_length + working + GIB
    assert place(gpt_oss, vram=[enough]).option.cpu_layer_count == 36
    (note,) = place(gpt_oss, vram=[enough - (2 << 20)]).notes
    assert "VRAM lacks 2.0 MiB beside the margin" in note
    # Two that have the room together, but the output fits into neither beside what is before it.
    half = (enough - GIB - working) // 2 + whole.compute_length + GIB
    (note,) = place(gpt_oss, vram=[half + whole.staged_length, half]).notes
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
    assert option.memory_expert_length + option.streamed_length == load(gpt_oss).expert_length
    assert value(option, "--memory") == f"{device.expert_length >> 20}MiB"
    whole = place(gpt_oss, engine="pack", memory=128 * GIB)
    assert (whole.option.streamed_length, value(whole.option, "--memory")) == (0, None)
    needed = device.dense_length + device.context_length + device.compute_length
    floor = needed + load(gpt_oss).floor + GIB
    least = place(gpt_oss, engine="pack", memory=floor).option
    assert least.memory_expert_length == load(gpt_oss).floor
    with pytest.raises(RequestError, match="too little memory") as caught:
        place(gpt_oss, engine="pack", memory=floor - (1 << 20))
    assert (caught.value.hint or "").startswith("1.0 MiB are missing")


def test_real_models_are_placed_and_run_as_it_says(tmp_path: Path) -> None:
    pack = tmp_path / "model.moepack"
    moepack.pack_model(first_shard("qwen3moe"), pack)
    facts = place(pack, context=64, margin=0, memory=16 << 20)
    assert facts.engine == "pack"
    words = shlex.split(facts.option.command)
    assert words[:3] == ["moepack", "run", str(pack)]


def test_hotness_decides_whether_experts_are_pinned() -> None:
    source = first_shard("qwen3moe")
    trace = source.parent / "qwen3moe-trace.csv"
    whole = load_of(source, MOEPACK_RUN._replace(token_count=64))
    fixed = place(source, engine="pack", context=64).devices[0]
    working = fixed.dense_length + fixed.context_length + fixed.compute_length
    memory = working + whole.floor + 1000
    facts = place(source, engine="pack", context=64, margin=0, memory=memory, traces=[str(trace)])
    assert facts.pins is not None
    assert facts.pins.lru_hit_rate is not None
    assert facts.pins.static_hit_rate is not None
    is_worth_it = facts.pins.verdict == "static" and (
        facts.pins.lru_hit_rate <= facts.pins.static_hit_rate - 0.05
    )
    assert bool(facts.pins.pin_length) == is_worth_it
    hotness = source.parent / "qwen3moe-hotness.csv"
    known = place(
        source, engine="pack", context=64, margin=0, memory=memory, hotness=str(hotness)
    ).pins
    assert known is not None
    assert known.lru_hit_rate is None, "counts do not know what comes after what"


def test_a_trace_of_another_model_says_nothing_of_pins(gpt_oss: Path) -> None:
    trace = first_shard("qwen3moe").parent / "qwen3moe-trace.csv"
    with pytest.raises(TraceError, match="far less of the experts"):
        place(gpt_oss, engine="pack", memory=32 * GIB, traces=[str(trace)])


def test_a_forecast_comes_with_a_machine(gpt_oss: Path) -> None:
    box = machine(memory=64, bandwidth=80, vram=24, vram_bandwidth=936)
    facts = moepack.place(gpt_oss, box, context=8192)
    first, cached = facts.option.forecast, facts.alternatives[-1].forecast
    assert first is not None
    assert first.cpu_layer_count == facts.option.cpu_layer_count
    assert first.tokens_per_second is not None
    assert cached is not None
    assert cached.vram_cache_length == facts.alternatives[-1].vram_cache_length
    assert cached.uploaded_length
    assert place(gpt_oss).option.forecast is None


@pytest.fixture
def three_tiers(gpt_oss: Path) -> PlacementFacts:
    box = machine(memory=32, bandwidth=80, drive=7, vram=24, vram_bandwidth=936)
    return moepack.place(gpt_oss, box, engine="pack")


def test_vram_memory_and_drive_are_one_plan(gpt_oss: Path, three_tiers: PlacementFacts) -> None:
    """What VRAM holds for good needs no room in memory, and no byte is there twice."""
    gpu, memory = three_tiers.devices
    option, whole = three_tiers.option, load(gpt_oss)
    assert (option.vram_expert_length, option.memory_expert_length) == (
        *(gpu.expert_length, memory.expert_length),
    )
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


def test_memory_is_asked_for_no_more_than_vram_leaves(gpt_oss: Path) -> None:
    facts = place(gpt_oss, engine="pack", vram=[24 * GIB], memory=128 * GIB)
    option, memory = facts.option, facts.devices[-1]
    assert option.streamed_length == 0
    assert memory.expert_length == option.memory_expert_length
    assert memory.expert_length + option.vram_expert_length == load(gpt_oss).expert_length
    assert value(option, "--memory") is None


def test_the_forecast_of_three_tiers_knows_them_all(three_tiers: PlacementFacts) -> None:
    option, speed = three_tiers.option, three_tiers.option.forecast
    assert speed is not None
    assert (speed.kind, speed.fits) == ("gpu-stream", True)
    assert speed.budget_length == option.memory_expert_length
    assert speed.cpu_layer_count == option.cpu_layer_count
    gpu, memory = three_tiers.devices
    assert speed.vram_length == gpu.length - gpu.left_length
    assert speed.memory_length == memory.length - memory.left_length
    cached, plain = three_tiers.alternatives
    assert cached.forecast is not None
    assert plain.forecast is not None
    assert plain.forecast.kind == "stream", "which leaves the GPU alone"
    assert (cached.cpu_layer_count, plain.cpu_layer_count) == (36, None)
    # A cache in VRAM keeps a second copy of what memory has; whole layers do not.
    assert (cached.forecast.missed_length or 0) > (speed.missed_length or 0)
    assert (speed.tokens_per_second or 0) > (cached.forecast.tokens_per_second or 0)


def test_a_gpu_has_room_for_a_copy_of_a_tensor_of_experts(gpt_oss: Path) -> None:
    whole = load(gpt_oss)
    longest = max(tensor.length for layer in whole.layers for tensor in layer.tensors)
    assert longest - whole.staged_length < 2 << 20, "the biases beside it"
    all_there, *_ = place(gpt_oss, vram=[128 * GIB]).devices
    some_there, *_ = place(gpt_oss, vram=[24 * GIB]).devices
    assert some_there.compute_length - all_there.compute_length == whole.staged_length
    first, second, _ = place(gpt_oss, vram=[24 * GIB] * 2).devices
    assert first.compute_length - second.compute_length == whole.staged_length


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
    stated = value(facts.option, "-ub")
    assert stated == (None if micro_batch == 512 else str(micro_batch))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "vllm"}, "no such engine, expected llama.cpp, ik_llama.cpp, pack"),
        ({"margin": -1}, "margin: not a size"),
        ({"memory": None}, "not known how much memory"),
        ({"traces": ["x"]}, "places whole layers"),
        ({"engine": "pack", "traces": ["x"], "hotness": "y"}, "either traces or hotness"),
        ({"cache_types": ("f16", "q9")}, "not a type for a cache"),
    ],
)
def test_requests_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        place(first_shard("qwen3moe"), **options)


def test_a_pack_is_nothing_for_llama_cpp(tmp_path: Path) -> None:
    pack = tmp_path / "model.moepack"
    moepack.pack_model(first_shard("qwen3moe"), pack)
    with pytest.raises(RequestError, match="reads GGUF, not packs"):
        place(pack, engine="llama.cpp")


def test_a_pack_of_experts_alone_does_not_say_what_the_rest_takes(tmp_path: Path) -> None:
    pack = tmp_path / "model.moepack"
    moepack.pack_model(first_shard("qwen3moe"), pack, experts_only=True)
    with pytest.raises(RequestError, match="not known what the model takes"):
        place(pack)
