"""Whole programs run a model within a limit of memory, and what they say is compared."""

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moepack.bench import engine_speed
from moepack.bench.engine_speed import PROGRAM_LENGTH, bench_run
from moepack.bench.memory_group import memory_group
from moepack.bench.stock_run import DEFAULTS, LOADINGS, MAPPED
from moepack.cli.bench import bench
from moepack.errors import MachineError, RequestError
from moepack.report import speed_text
from moepack.storage import page_cache
from tests.support.models import first_shard, shards_of
from tests.support.needs import needs_llama

MIB = 1 << 20


@needs_llama
def test_all_ways_give_the_same_text_and_are_compared(
    packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder of links, which names its model; none of its shards is cached at the start."""
    dropped: list[list[str]] = []
    drop = page_cache.drop

    def note(paths: Iterable[Path]) -> None:
        dropped.append([path.name for path in paths])
        drop(paths)

    monkeypatch.setattr(page_cache, "drop", note)
    shards = [Path(shard) for shard in shards_of("qwen3moe")]
    for shard in shards:
        (tmp_path / shard.name).symlink_to(shard)
    done: list[int] = []
    speed = bench_run(
        packs["qwen3moe"],
        source=tmp_path,
        memory=PROGRAM_LENGTH + 40 * MIB,
        tokens=12,
        rounds=1,
        context=64,
        threads=1,
        progress=lambda count, total: done.append(total),
    )
    assert [side.name for side in speed.sides] == ["pack", "shards", *LOADINGS]
    assert speed.same_text is True
    assert done == [5] * 5
    assert len(dropped) == 5
    assert all(names[-len(shards) :] == [shard.name for shard in shards] for names in dropped)
    ours, _, mapped, *_ = speed.sides
    assert all((side.tokens_per_second or 0) > 0 for side in speed.sides)
    assert ours.hit_rate is not None
    assert ours.read_length_per_token is not None
    assert (mapped.hit_rate, mapped.read_length_per_token, mapped.read_share) == (None, None, None)
    text = speed_text.text(speed)
    assert "All gave the same text." in text
    assert text.splitlines()[-3].startswith("llama.cpp, defaults")


@needs_llama
def test_the_command_prints_it(packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_speed, "bench_run", partial(bench_run, rounds=1, tokens=4, threads=1)
    )
    words = [str(packs["qwen3moe"]), "--run", "--memory", "220MiB"]
    run = CliRunner().invoke(bench, words, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert "220.0 MiB" in run.stdout or "no limit" in run.stdout
    assert "pack " in run.stdout
    with pytest.raises(RequestError, match="--memory is for --run"):
        CliRunner().invoke(bench, [words[0], *words[2:]], catch_exceptions=False)


def test_a_limit_that_the_program_alone_needs_is_refused(packs: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="too little memory"):
        bench_run(packs["qwen3moe"], memory=PROGRAM_LENGTH)


@needs_llama
def test_a_program_that_fails_is_an_error_with_its_words(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MachineError, match="too little memory for the experts"):
        bench_run(packs["qwen3moe"], memory=PROGRAM_LENGTH + 1000, rounds=1)


def test_a_program_that_takes_more_than_the_limit_is_killed() -> None:
    code = "import sys; held = bytearray(int(sys.argv[1])); sys.stdout.write('{}')"
    with memory_group(100 * MIB) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        small, large = (
            subprocess.run(
                group.command([sys.executable, "-c", code, str(count * MIB)]), check=False
            )
            for count in (20, 300)
        )
    assert (small.returncode, large.returncode) == (0, -9)
    assert not list(Path("/sys/fs/cgroup").rglob(f"moepack-bench-{os.getpid()}"))


def test_a_run_that_was_killed_has_no_speed() -> None:
    assert engine_speed._run(["sh", "-c", "kill -9 $$"], None) == {}
    assert engine_speed._facts("pack", [{}]).tokens_per_second is None
    facts = engine_speed._facts("pack", [{"tokens_per_second": 3.0}, {}])
    assert facts.tokens_per_second == 3


def test_several_runs_have_a_median_and_its_bounds() -> None:
    facts = engine_speed._facts("pack", [{"tokens_per_second": speed} for speed in (5.0, 2.0, 3.0)])
    assert facts.tokens_per_second_lowest == 2
    assert facts.tokens_per_second == 3
    assert facts.tokens_per_second_highest == 5


@pytest.mark.parametrize(("other", "is_same"), [(DEFAULTS, True), (MAPPED, False)])
def test_llama_cpp_may_round_otherwise_with_its_defaults_alone(
    other: str, is_same: bool, packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], _: object) -> dict[str, Any]:
        return {"text": "other" if other in command else "text", "tokens_per_second": 1.0}

    monkeypatch.setattr(engine_speed, "_run", run)
    limit, source = PROGRAM_LENGTH + 40 * MIB, first_shard("qwen3moe")
    speed = bench_run(packs["qwen3moe"], source=source, memory=limit, rounds=1)
    assert speed.same_text is is_same
