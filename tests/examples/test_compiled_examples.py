"""The examples in C, C++ and Rust read what Python reads; that in Rust gives all verdicts."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import moepack
from conformance import make_packs, variants
from moepack.common import digest
from moepack.running.programs.compiling import SOURCES
from moepack.running.programs.library import native_folder
from tests.support.built import built
from tests.support.c_compiler import SANITIZERS, compiled, compiled_once
from tests.support.children import run_command
from tests.support.packs import ranked_meanwhile

ROOT = Path(__file__).parents[2]
PACKS = make_packs.FOLDER
RANK_MEANWHILE = ROOT / "tests" / "support" / "rank_meanwhile.c"


def parts_of(pack: moepack.Pack, keys: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield a line for each part of experts, as all examples print it, with Python's digest."""
    with pack.reader(backend="buffered") as reader:
        for layer, expert in keys:
            for kind in pack.parts(layer):
                xxh3 = digest.xxh3(reader.read(layer, expert, kind.name))
                yield f"layer {layer} expert {expert} {kind.name}: xxh3:{xxh3:016x}"


def compiled_example(name: str, *flags: str) -> Path:
    source = ROOT / "examples" / name
    compiler, standard = ("cc", "gnu99") if source.suffix == ".c" else ("c++", "gnu++17")
    options = (f"-std={standard}", "-Wno-pedantic", *flags)
    return compiled_once(source.stem, compiler, *options, source)


def output_of(program: Path, pack: Path, *arguments: object) -> list[str]:
    run = run_command(program, pack, *arguments)
    if "io_uring_queue_init" in run.stderr:
        pytest.skip("io_uring does not work here")
    assert run.stderr == ""
    assert run.returncode == 0
    return run.stdout.splitlines()


# routed_experts.c


@pytest.fixture(scope="module")
def routed_experts() -> Path:
    """Compile the example, with sanitizers."""
    return compiled_example("routed_experts.c", *SANITIZERS)


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
    program = compiled_example("double_buffer.c", "-luring")
    with moepack.open(sources[source]) as pack:
        keys = [(layer, expert) for layer in pack.layers for expert in (3, 0, 1)]
        assert output_of(program, sources[source], 3, 0, 1) == list(parts_of(pack, keys))


# resident_experts.c


@pytest.mark.parametrize("source", ["pack", "with digests", "without"])
def test_a_program_computes_with_experts_where_they_are_in_memory(
    source: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    native = [str(native_folder() / f"{name}.c") for name in SOURCES["cache"]]
    libraries = ("-lm", "-lpthread")
    program = compiled_example("resident_experts.c", *SANITIZERS, *native, *libraries)
    with moepack.open(sources[source]) as pack:
        layer = pack.layers[-1]
        expected = list(parts_of(pack, [(layer, 3), (layer, 0), (layer, 3)]))
        assert output_of(program, sources[source], 1 << 30, layer, 3, 0, 3) == expected


# expert_cache.cpp


@pytest.fixture(scope="module")
def expert_cache() -> Path:
    """Compile the example, with sanitizers."""
    return compiled_example("expert_cache.cpp", *SANITIZERS)


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


# read_pack.rs


@pytest.fixture(scope="module")
def read_pack() -> Path:
    """Compile the example once; arithmetic that overflows is an error."""
    if shutil.which("rustc") is None:
        pytest.skip("there is no rustc here")
    flags = ("--edition", "2021", "-O", "-D", "warnings", "-C", "overflow-checks=on")
    command = ("rustc", *flags, ROOT / "examples" / "read_pack.rs")

    def make(target: Path) -> None:
        run = run_command(*command, "-o", target)
        if "is_none_or" in run.stderr:
            pytest.skip("rustc is older than 1.82")
        assert run.returncode == 0, run.stderr

    return built("read_pack", make, *command)


@pytest.mark.long
@pytest.mark.parametrize("source", ["pack", "with digests", "without"])
def test_experts_are_read(source: str, sources: dict[str, Path], read_pack: Path) -> None:
    with moepack.open(sources[source]) as pack:
        layer = pack.layers[-1]
        expected = list(parts_of(pack, [(layer, 3), (layer, 0)]))
    run = run_command(read_pack, sources[source], layer, 3, 0)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == expected


def verdicts() -> Iterator[dict[str, Any]]:
    """List the packs of verdicts that a reader of one name in the manifest gives."""
    for entry in json.loads((PACKS / "verdicts.json").read_text()):
        if not entry.get("needs_manifest"):
            yield entry


@pytest.mark.long
def test_sound_packs_are_read(read_pack: Path) -> None:
    packs = [entry for entry in verdicts() if entry["verdict"] == "sound"]
    assert len(packs) >= 25
    for entry in packs:
        part_count = sum(len(expert["parts"]) for expert in entry["experts"])
        counts = f"{len(entry['experts'])} experts, {part_count} parts"
        run = run_command(read_pack, PACKS / entry["pack"])
        assert run.stdout == f"readable: {counts}, {len(entry['dense'])} tensors\n", entry["pack"]


@pytest.mark.long
def test_broken_packs_are_refused_in_words(read_pack: Path) -> None:
    """Those, too, whose fault only verification finds: they are read."""
    numbers = {variants.OPENING: 0, variants.USE: 0, variants.VERIFICATION: 0}
    for entry in verdicts():
        verdict = entry["verdict"]
        if verdict not in numbers or entry["asked_for"] not in (None, "experts", "dense"):
            continue
        numbers[verdict] += 1
        run = run_command(read_pack, PACKS / entry["pack"])
        assert run.returncode == (verdict != variants.VERIFICATION), entry["pack"]
        assert bool(run.stderr) == bool(run.returncode)
        assert "panicked" not in run.stderr, entry["pack"]
    assert min(numbers.values()) >= 12, numbers


@pytest.mark.long
def test_a_pack_that_is_ranked_while_it_is_opened_opens_with_the_new_ranking(
    packs: dict[str, Path], tmp_path: Path, read_pack: Path
) -> None:
    source, library = RANK_MEANWHILE, tmp_path / "rank_meanwhile.so"
    built = compiled(
        "cc", "-D_GNU_SOURCE", "-DPRELOADED", "-shared", "-fPIC", source, "-o", library
    )
    assert built.returncode == 0, built.stderr
    path = ranked_meanwhile(packs["gpt-oss"], tmp_path / "pack")
    run = run_command(read_pack, path, env={**os.environ, "LD_PRELOAD": str(library)})
    assert not (path / "index.bin").exists()
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("readable: ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("broken-section-a-codec", 'needs the section "codec-zstd"'),
        ("broken-file-kind-3", "experts-00000.bin: needs files of kind 3"),
    ],
)
def test_an_unknown_codec_or_kind_of_file_is_refused_by_name(
    name: str, feature: str, read_pack: Path
) -> None:
    run = run_command(read_pack, PACKS / name)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"{feature}, which this reader does not know\n"
