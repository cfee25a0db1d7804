"""Whole programs run a model within a limit of memory, and what they say is compared."""

import os
import subprocess
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moepack.bench import engine_runs, engine_speed
from moepack.bench.control_group import control_group
from moepack.bench.engine_runs import (
    DEFAULTS,
    LOADINGS,
    MAPPED,
    PROGRAM_LENGTH,
    READ,
    EngineRun,
    PhaseRun,
    RunMemory,
    RunRequest,
    divide_memory,
)
from moepack.bench.engine_speed import bench_run
from moepack.cli.bench import bench
from moepack.common.errors import MachineError, RequestError, SourceError
from moepack.host.memory_limits import kill_count
from moepack.pack.reading.pack import Pack
from moepack.report import measure_text
from moepack.running.streaming.supervisor import StreamingOptions, Supervisor
from moepack.storage import page_cache
from tests.support.interruptions import before_each
from tests.support.models import first_shard, shards_of
from tests.support.needs import needs_llama, require_disk

MIB = 1 << 20


@needs_llama
def test_all_ways_give_the_same_text_and_are_compared(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder of links, which names its model; none of its shards is cached at the start."""
    dropped: list[list[str]] = []

    def note(_: str, paths: Iterable[Path]) -> None:
        dropped.append([path.name for path in paths])

    before_each(monkeypatch, note, (page_cache, "drop"))
    shards = [Path(shard) for shard in shards_of("qwen3moe")]
    for shard in shards:
        (tmp_path / shard.name).symlink_to(shard)
    done: list[int] = []
    limit = least_limit(pack, context=1024) + (1 << 18)
    speed = bench_run(
        pack.path,
        source=tmp_path,
        memory=limit,
        prompt_tokens=40,
        tokens=400,  # of fewer, a busy machine may have none left when the first is seen
        rounds=1,
        threads=1,
        progress=lambda count, total: done.append(total),
    )
    assert [side.name for side in speed.sides] == ["pack", "shards", *LOADINGS]
    assert speed.same_text is True
    assert done == [5] * 5
    assert len(dropped) == 5
    assert all(names[-len(shards) :] == [shard.name for shard in shards] for names in dropped)
    assert speed.prompt_count == 40
    ours, _, mapped, *_ = speed.sides
    for side in speed.sides:
        assert side.prompt.tokens_per_second is not None
        assert side.decode.tokens_per_second is not None
        assert side.first_token_seconds is not None
        # Whoever waits for the first token waits for the whole prompt.
        assert side.first_token_seconds.median >= 40 / side.prompt.tokens_per_second.median
    assert 0 < (ours.decode.hit_rate or 0) < 1
    assert (ours.decode.read_length_per_token or 0) > 0
    assert (ours.prompt.misses or 0) > 0
    assert (ours.prompt.read_length or 0) > 0
    assert (mapped.prompt.misses, mapped.decode.hit_rate, mapped.decode.read_share) == (None,) * 3
    assert mapped.prompt.read_length is not None
    text = str(measure_text.speed(speed))
    assert "All gave the same text." in text
    assert f"a prompt of 40 tokens, {speed.micro_batch} at once" in text
    assert text.splitlines()[-3].startswith("llama.cpp, defaults")
    assert text.splitlines()[-3].split()[-2:] == ["–", "–"]


def run_of(text: str, speed: float) -> EngineRun:
    """Return a run as fast as that, of a prompt that was twice as fast."""
    return EngineRun(text, 20 / speed, PhaseRun(10, 2 * speed), PhaseRun(59, speed))


@pytest.fixture
def faked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each program give the same text at the same speed."""
    monkeypatch.setattr(engine_speed, "run_moepack", lambda *_: run_of("text", 1.0))
    monkeypatch.setattr(engine_speed, "run_alone", lambda *_: run_of("text", 1.0))
    monkeypatch.setattr(engine_speed, "beginning_of", lambda text, count, pack: text)


def least_limit(pack: Pack, context: int) -> int:
    """Return the least limit within which a pack may run."""
    limits = range(PROGRAM_LENGTH, 1 << 30)

    def fits(limit: int) -> bool:
        try:
            divide_memory(pack, limit, context=context)
        except RequestError:
            return False
        return True

    return limits[bisect_left(limits, True, key=fits)]


def test_the_command_prints_it(packs: dict[str, Path], faked_runs: None) -> None:
    words = [str(packs["qwen3moe"]), "--run", "--memory", "320MiB", "--prompt-tokens", "30"]
    words += ["--prompt-file", "fixtures/prompt.txt", "--micro-batch", "16"]
    run = CliRunner().invoke(bench, words, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert "320.0 MiB" in run.stdout or "no limit" in run.stdout
    assert "MiB of it for experts under moepack" in run.stdout
    assert "a prompt of 10 tokens, 16 at once" in run.stdout
    assert "pack " in run.stdout
    with pytest.raises(RequestError, match="--memory is for --run"):
        CliRunner().invoke(bench, [words[0], *words[2:]], catch_exceptions=False)


def test_smaller_micro_batches_are_taken_where_others_do_not_fit(pack: Pack) -> None:
    """The supervisor takes what it is given."""
    start = least_limit(pack, 64)
    micro_batches = set()
    for limit in range(start, start + (4 << 20), 1 << 19):
        memory = divide_memory(pack, limit, context=64)
        micro_batches.add(memory.micro_batch)
        options = StreamingOptions(memory.experts, micro_batch=memory.micro_batch)
        with Supervisor(pack, options, lambda error: None):
            pass
    assert min(micro_batches) < 16
    assert max(micro_batches) == 64  # the whole context


@needs_llama
def test_a_prompt_is_the_beginning_of_a_text_and_has_as_many_tokens(pack: Pack) -> None:
    text = engine_speed.reference_text()
    beginning = engine_speed.beginning_of(text, 700, pack)
    assert text.startswith(beginning)
    assert len(beginning) >= 700
    assert engine_speed.beginning_of("Short.", 700, pack) == "Short."


@pytest.mark.parametrize("is_direct", [True, False])
def test_programs_read_no_faster_than_a_limit(is_direct: bool, tmp_path: Path) -> None:
    require_disk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * MIB))
    os.sync()
    page_cache.drop([path])
    try:
        with control_group(reads={path: 16 * MIB}) as group:
            assert group is not None
            options = ["iflag=direct"] if is_direct else []
            command = ["dd", f"if={path}", "of=/dev/null", "bs=1M", *options]
            began = time.monotonic()
            subprocess.run(group.command(command), check=True, capture_output=True)
            seconds = time.monotonic() - began
    except MachineError as error:
        pytest.skip(str(error))
    assert seconds > 0.35


def test_too_small_a_limit_is_refused_with_what_there_is_to_hold(packs: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="too little memory to run the model") as refusal:
        bench_run(packs["qwen3moe"], memory=PROGRAM_LENGTH)
    assert "256.0 MiB the programs, 335.1 KiB dense" in str(refusal.value)


@needs_llama
def test_a_program_that_fails_is_an_error_with_its_words() -> None:
    request = RunRequest("a", 1, 64, 1, RunMemory(4096, 1))
    with pytest.raises(MachineError, match="/no/such/pack: no such file"):
        engine_runs.run_moepack(["/no/such/pack"], request, None)
    with pytest.raises(SourceError, match="cannot read the model"):
        engine_runs.run_alone("/no/such.gguf", MAPPED, request, None)


@needs_llama
def test_programs_that_the_limit_is_too_small_for_were_killed() -> None:
    """A whole Python does not fit: neither the server's alone, nor that of the supervisor."""
    request = RunRequest("a", 1, 64, 1, RunMemory(1 << 20, 1))
    shards = shards_of("qwen3moe")
    with control_group(12 * MIB) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        assert engine_runs.run_alone(shards[0], READ, request, group) is None
        count = kill_count(group.folders)
        assert count
        assert engine_runs.run_moepack(shards, request, group) is None
        assert kill_count(group.folders) > count
    assert not list(Path("/sys/fs/cgroup").rglob(f"moepack-bench-{os.getpid()}"))


@pytest.mark.parametrize(
    ("other", "is_same"), [(DEFAULTS, True), (MAPPED, False), (None, True), ("all", None)]
)
def test_llama_cpp_may_round_otherwise_with_its_defaults_alone(
    other: str | None, is_same: bool | None, packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = iter([5.0, 1.0, 1.0, 2.0, 4.0, 1.0])

    def run_moepack(paths: Sequence[str], *_: Any) -> EngineRun | None:
        return None if other == "all" else run_of("text", next(speeds))

    def run_alone(path: str, loading: str, *_: Any) -> EngineRun | None:
        if other in ("all", None):
            return None
        return run_of("other" if loading == other else "text", 1.0)

    monkeypatch.setattr(engine_speed, "run_moepack", run_moepack)
    monkeypatch.setattr(engine_speed, "run_alone", run_alone)
    monkeypatch.setattr(engine_speed, "beginning_of", lambda text, count, pack: text)
    limit, source = PROGRAM_LENGTH + 40 * MIB, first_shard("qwen3moe")
    speed = bench_run(packs["qwen3moe"], source=source, memory=limit)
    assert speed.same_text is is_same
    ours, alone = speed.sides[0], speed.sides[-1]
    if other != "all":  # the pack has the first, the fourth and the fifth turn of six
        assert ours.decode.tokens_per_second == (4, 2, 5)
        assert ours.prompt.tokens_per_second == (8, 4, 10)
        assert ours.first_token_seconds == (5, 4, 10)
    else:
        assert (ours.first_token_seconds, ours.decode.tokens_per_second) == (None, None)
    assert (alone.decode.tokens_per_second is None) is (other in ("all", None))


def test_a_model_that_is_not_packed_is_compared_with_llama_cpp_alone(faked_runs: None) -> None:
    speed = bench_run(first_shard("qwen3moe"), memory=512 * MIB)
    assert [side.name for side in speed.sides] == ["shards", *LOADINGS]
