"""The examples in C and C++ read what Python reads."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import moepack
from tests.support.c_compiler import SANITIZERS, compiled
from tests.support.children import run_command
from tests.support.example_output import parts_of

ROOT = Path(__file__).parents[2]
PACKS = ROOT / "conformance" / "packs"


def compiled_example(name: str, folder: Path, *flags: str) -> Path:
    target, source = folder / Path(name).stem, ROOT / "examples" / name
    compiler, standard = ("cc", "gnu99") if source.suffix == ".c" else ("c++", "gnu++17")
    options = (f"-std={standard}", "-Wno-pedantic", *flags)
    run = compiled(compiler, *options, source, "-o", target)
    assert run.returncode == 0, run.stderr
    return target


def output_of(program: Path, pack: Path, *arguments: object) -> list[str]:
    run = run_command(program, pack, *arguments)
    if "io_uring_queue_init" in run.stderr:
        pytest.skip("io_uring does not work here")
    assert run.stderr == ""
    assert run.returncode == 0
    return run.stdout.splitlines()


# routed_experts.c


@pytest.fixture(scope="module")
def routed_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the example once, with sanitizers."""
    return compiled_example("routed_experts.c", tmp_path_factory.mktemp("c"), *SANITIZERS)


@pytest.mark.parametrize(
    ("source", "word"), [("pack", "sound"), ("with digests", "sound"), ("without", "unchecked")]
)
def test_the_routed_experts_are_read(
    source: str, word: str, sources: dict[str, Path], routed_experts: Path
) -> None:
    with moepack.open(sources[source]) as pack:
        layer = pack.layers[-1]
        routed = [3, 0, pack.expert_count(layer) - 1, 3]
        assert output_of(routed_experts, sources[source], layer, *routed) == [
            f"expert {expert} {kind.name}: {kind.type_name}, {kind.length} bytes, {word}"
            for expert in routed
            for kind in pack.parts(layer)
        ]


def test_a_direct_read_of_a_file_that_ends_too_early_is_short(
    packs: dict[str, Path], tmp_path: Path, routed_experts: Path
) -> None:
    path = Path(shutil.copytree(packs["gpt-oss"], tmp_path / "pack"))
    with moepack.open(path) as pack:
        blob = pack.locate(pack.layers[0], 1)
    assert blob.path is not None
    assert blob.offset is not None
    for left in (5000, 4096, 10, 0):
        os.truncate(blob.path, blob.offset + left)
        command = [str(routed_experts), str(path), str(blob.layer), "1"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 1
        problem = f"expected {blob.length} bytes at {blob.offset}, found {left}"
        assert run.stderr == f"{blob.path.name}: {problem}\n"


# double_buffer.c


@pytest.mark.parametrize("source", ["pack", "with digests"])
def test_layers_are_read_into_two_halves_of_memory(
    source: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    if not Path("/usr/include/liburing.h").exists():
        pytest.skip("liburing is not installed here")
    # Without sanitizers, which know nothing of the memory that liburing shares.
    program = compiled_example("double_buffer.c", tmp_path, "-luring")
    with moepack.open(sources[source]) as pack:
        keys = [(layer, expert) for layer in pack.layers for expert in (3, 0, 1)]
        assert output_of(program, sources[source], 3, 0, 1) == list(parts_of(pack, keys))


# expert_cache.cpp


@pytest.fixture(scope="module")
def expert_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the example once, with sanitizers."""
    return compiled_example("expert_cache.cpp", tmp_path_factory.mktemp("c"), *SANITIZERS)


def slot_length(pack: moepack.Pack) -> int:
    """Return the bytes of a slot: of each part the longest, on pages."""
    lengths = [[kind.length for kind in pack.parts(layer)] for layer in pack.layers]
    return sum(-(-max(parts) // 4096) * 4096 for parts in zip(*lengths, strict=True))


@pytest.mark.parametrize("source", ["pack", "with digests"])
def test_a_cache_reads_what_is_missing_and_evicts_the_least_recently_used(
    source: str, sources: dict[str, Path], expert_cache: Path
) -> None:
    with moepack.open(sources[source]) as pack:
        first, second, third = pack.hottest(1 << 60)[:3]
        routed = [first, third, first, second, third]
        arguments = [f"{layer}:{expert}" for layer, expert in routed]
        budget = 2 * slot_length(pack) + 1
        lines = output_of(expert_cache, sources[source], budget, *arguments)
        dense = [
            f"dense {tensor.name}: {tensor.type_name}, {tensor.length} bytes"
            for tensor in pack.dense()
        ]
        assert dense
        assert lines[: len(dense)] == dense
        experts = sum(pack.expert_count(layer) for layer in pack.layers)
        assert lines[len(dense)] == f"2 of {experts} experts are loaded"
        # The two hottest are there; the third takes the place of the second, and so on.
        words = ("hit", "read", "hit", "read", "read")
        assert lines[len(dense) + 1 :] == [
            f"{word} {line}"
            for word, key in zip(words, routed, strict=True)
            for line in parts_of(pack, [key])
        ]


def test_a_cache_reads_experts_without_blobs_and_of_every_alignment(expert_cache: Path) -> None:
    for name in ("both-kinds", "over-shards", "small-parts", "alignment-16KiB", "natural"):
        with moepack.open(PACKS / name) as pack:
            keys = [(layer, 0) for layer in pack.layers]
            expected = list(parts_of(pack, keys))
        arguments = [f"{layer}:{expert}" for layer, expert in keys]
        lines = output_of(expert_cache, PACKS / name, 0, *arguments)[-len(expected) :]
        assert [line.partition(" ")[2] for line in lines] == expected
