"""The C header reads what Python reads, refuses what Python refuses, and touches nothing else."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import moepack
from moepack.packing.shard_index import index_model
from tests.support.c_compiler import SANITIZERS, compiled
from tests.support.c_readers import c_says, python_says
from tests.support.children import PATIENCE
from tests.support.gguf_builder import Q8_0, moe
from tests.support.models import REAL_MODELS, first_shard, flip, pack_model

ROOT = Path(__file__).parents[2]
C_COMPILERS = ("gcc", "clang")
CXX_COMPILERS = ("g++", "clang++")


# Compiling.


@pytest.mark.parametrize("optimized", ["-O0", "-O2"])
@pytest.mark.parametrize("compiler", [*C_COMPILERS, *CXX_COMPILERS])
def test_the_header_compiles_without_a_warning(
    compiler: str, optimized: str, tmp_path: Path
) -> None:
    standard = ("-x", "c++", "-std=c++17") if "+" in compiler else ("-x", "c", "-std=c99")
    for name, text in {"one": "#define MOEPACK_IMPLEMENTATION\n", "two": ""}.items():
        main = "" if text else "int main(void) { return moepack_code_name(MOEPACK_OK)[0] != 'O'; }"
        (tmp_path / f"{name}.c").write_text(f'{text}#include "moepack.h"\n{main}\n')
    sources = (tmp_path / "one.c", tmp_path / "two.c")
    run = compiled(compiler, optimized, *standard, *sources, "-o", tmp_path / "program")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    subprocess.run([tmp_path / "program"], check=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"), "little-endian"),
        (("-UO_CLOEXEC", "-D_POSIX_C_SOURCE=199309L", "-std=c99"), "POSIX 2008"),
    ],
)
def test_what_cannot_work_is_refused_by_the_compiler(
    flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    source = tmp_path / "one.c"
    source.write_text('#define MOEPACK_IMPLEMENTATION\n#include "moepack.h"\n')
    run = compiled("cc", "-std=c99", "-U_POSIX_C_SOURCE", *flags, "-fsyntax-only", source)
    assert run.returncode != 0
    assert words in run.stderr


# Sound packs.


@pytest.mark.parametrize("model", REAL_MODELS)
def test_every_part_of_a_real_model_is_the_same_in_c_and_python(
    model: str, packs: dict[str, Path], program: Path
) -> None:
    (found,) = c_says(program, "list", [packs[model]])
    assert found == python_says(packs[model], reads=True)
    assert found.refusal == ""


def test_the_order_from_hot_to_cold_is_that_of_python(small: Path, program: Path) -> None:
    (found,) = c_says(program, "check", [small])
    order = [line.split() for line in found.found if line.startswith("rank")]
    with moepack.open(small) as pack:
        assert [(int(row[2]), int(row[4])) for row in order] == pack.hottest(1 << 40)
    assert any(line.endswith(" 9") for line in found.found if line.startswith("blob"))


def test_families_of_one_layer_are_told_apart(tmp_path: Path, program: Path) -> None:
    builder = moe((0, 3), experts=8).put("qwen3moe.experts_per_group", "u32", 4)
    builder.put("qwen3moe.attention.value_expert_count", "u32", 3)
    for name in ("up", "down"):
        builder.tensor(f"blk.0.ffn_{name}_chexps.weight", (64, 64, 2), Q8_0, 68)
    builder.tensor("blk.0.attn_v_exps.weight", (64, 16, 3), Q8_0, 68)
    pack_model([builder.write(tmp_path / "m.gguf")], tmp_path / "pack")
    (found,) = c_says(program, "list", [tmp_path / "pack"])
    assert found == python_says(tmp_path / "pack", reads=True)
    assert "ffn_chexps" in str(found)


def test_layers_with_gaps_and_large_numbers_are_found(tmp_path: Path, program: Path) -> None:
    """They share a place in the reader's table."""
    model = moe((3, 19, 35, 36, 1059), 2).write(tmp_path / "m.gguf")
    pack_model([model], tmp_path / "pack")
    (found,) = c_says(program, "check", [tmp_path / "pack"])
    assert found == python_says(tmp_path / "pack")
    assert found.refusal == ""


def test_ranges_are_rounded_outwards(program: Path) -> None:
    run = subprocess.run([program, "round"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_what_the_pack_does_not_hold_is_said_so(small: Path, program: Path) -> None:
    run = subprocess.run([program, "misuse", small], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "SYSTEM experts-00000.bin: cannot read: Bad file descriptor" in run.stdout
    assert "NO_SUCH index.bin: layer 0: ffn_exps has 2 experts, not number 2" in run.stdout
    assert "NO_SUCH index.bin: there are no experts in layer 4096" in run.stdout
    assert f"path {small / 'experts-00000.bin'}\n" in run.stdout


def test_a_call_that_fails_is_an_error_and_leaves_nothing_behind(
    either: Path, program: Path
) -> None:
    """Memory, a descriptor or a mapping that stayed would be noticed."""
    run = subprocess.run([program, "starve", either], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert [
        line.partition(" cannot ")[2].partition(":")[0] for line in run.stdout.splitlines()
    ] == [
        *("allocate memory", "open", "prepare", "prepare", "allocate memory"),
        *("open", "prepare", "prepare", "map", "allocate memory", "allocate memory"),
        *(("open", "prepare", "prepare") * 2 if either.name == "index" else ()),
        *(("allocate memory",) if either.name == "index" else ()),
    ]


# Files.


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def folder_for(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return change


def pipe_for(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def cut(name: str, length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, length)


def loop_for(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(name)

    return change


DATA = "experts-00001.bin"
NO_PACK = "NOT_A_PACK manifest.json: no such file: not a pack"
BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (without("manifest.json"), NO_PACK),
    "a folder for a manifest": (folder_for("manifest.json"), NO_PACK),
    "nothing": (shutil.rmtree, NO_PACK),
    "no index": (without("index.bin"), "DAMAGED index.bin: the file is missing"),
    "a folder for an index": (folder_for("index.bin"), "DAMAGED index.bin: not a regular file"),
    "a pipe for an index": (pipe_for("index.bin"), "DAMAGED index.bin: not a regular file"),
    "an empty index": (cut("index.bin", 0), "DAMAGED index.bin: header: cut short"),
    "an index of 63 bytes": (cut("index.bin", 63), "DAMAGED index.bin: header: cut short"),
    "an index of 64 bytes": (cut("index.bin", 64), "DAMAGED index.bin: index_length"),
    "an index of 1 GiB": (
        cut("index.bin", 1 << 30),
        "DAMAGED index.bin: index_length: expected 1073741824 as",
    ),
    "an index of more": (
        cut("index.bin", (1 << 30) + 1),
        "DAMAGED index.bin: index_length: expected up to 1073741824 bytes, found 1073741825",
    ),
    "no data": (without(DATA), f"DAMAGED {DATA}: the file is missing"),
    "a pipe for data": (pipe_for(DATA), f"DAMAGED {DATA}: not a regular file"),
    "a folder for data": (folder_for(DATA), f"DAMAGED {DATA}: not a regular file"),
    "a link to itself": (loop_for(DATA), f"SYSTEM {DATA}: cannot open: "),
    "data cut in a part": (cut(DATA, 10), f"SHORT_READ {DATA}: expected 32 bytes at 0, found 10"),
    "no bytes of data": (cut(DATA, 0), f"SHORT_READ {DATA}: expected 32 bytes at 0, found 0"),
    "a changed byte": (lambda path: flip(path / DATA, 31), f"DIGEST {DATA}: ffn_gate_exps.weight"),
}


def test_files_that_are_missing_cut_or_changed_are_named(
    small: Path, tmp_path: Path, program: Path
) -> None:
    paths = []
    for number, (damage, _) in enumerate(BAD_FILES.values()):
        paths.append(Path(shutil.copytree(small, tmp_path / str(number))))
        damage(paths[-1])
    verdicts = c_says(program, "list", paths)
    for name, verdict in zip(BAD_FILES, verdicts, strict=True):
        assert verdict.refusal.startswith(BAD_FILES[name][1]), (name, verdict.refusal)


def test_symbolic_links_are_followed_and_a_long_path_is_an_error(
    small: Path, tmp_path: Path, program: Path
) -> None:
    for name in os.listdir(small):
        (tmp_path / name).symlink_to(small / name)
    paths = [tmp_path, Path("/" + "x/" * 2100), Path("/" + "x" * 300), small / "index.bin"]
    linked, long, odd, file = c_says(program, "list", paths)
    assert linked == python_says(small, reads=True)
    assert long.refusal == "BUFFER manifest.json: the path is too long"
    assert odd.refusal == "SYSTEM manifest.json: cannot open: File name too long"
    assert file.refusal.startswith("NOT_A_PACK manifest.json: ")


# The example.


def example_on(pack: Path, program: Path, layer: int, experts: list[int]) -> list[str]:
    command = [str(program), str(pack), str(layer), *map(str, experts)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if "io_uring_queue_init" in run.stderr:
        pytest.skip("io_uring does not work here")
    assert run.stderr == ""
    assert run.returncode == 0
    return run.stdout.splitlines()


@pytest.mark.parametrize("flags", [(), ("-DUSE_URING", "-luring")], ids=["pread", "uring"])
def test_the_example_reads_what_the_router_chose(
    flags: tuple[str, ...], packs: dict[str, Path], tmp_path: Path
) -> None:
    if flags and not Path("/usr/include/liburing.h").exists():
        pytest.skip("liburing is not installed here")
    source = ROOT / "examples" / "routed_experts.c"
    sanitizers = () if flags else SANITIZERS  # liburing shares memory that they know nothing of
    run = compiled(
        "cc", "-std=gnu99", "-Wno-pedantic", *sanitizers, source, *flags, "-o", tmp_path / "x"
    )
    assert run.returncode == 0, run.stderr
    index_model(first_shard("gpt-oss"), tmp_path / "with", digests=True)
    index_model(first_shard("gpt-oss"), tmp_path / "without")
    held = {
        packs["gpt-oss"]: "sound",
        tmp_path / "with": "sound",
        tmp_path / "without": "unchecked",
    }
    for path, word in held.items():
        with moepack.open(path) as pack:
            layer = pack.layers[-1]
            chosen = [3, 0, pack.expert_count(layer) - 1, 3]
            assert example_on(path, tmp_path / "x", layer, chosen) == [
                f"expert {expert} {kind.name}: {kind.type_name}, {kind.length} bytes, {word}"
                for expert in chosen
                for kind in pack.parts(layer)
            ]


def test_the_example_needs_no_file_of_second_places(tmp_path: Path) -> None:
    source = ROOT / "examples" / "routed_experts.c"
    run = compiled("cc", "-std=gnu99", "-Wno-pedantic", *SANITIZERS, source, "-o", tmp_path / "x")
    assert run.returncode == 0, run.stderr
    path = ROOT / "conformance" / "packs" / "second-place-missing"
    assert not (path / "second.bin").exists()
    assert len(example_on(path, tmp_path / "x", 1, [1])) == 3


def test_a_direct_read_of_a_file_that_ends_too_early_is_short(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    source = ROOT / "examples" / "routed_experts.c"
    run = compiled("cc", "-std=gnu99", "-Wno-pedantic", source, "-o", tmp_path / "x")
    assert run.returncode == 0, run.stderr
    path = Path(shutil.copytree(packs["gpt-oss"], tmp_path / "pack"))
    with moepack.open(path) as pack:
        blob = pack.locate(pack.layers[0], 1)
    assert blob.path is not None
    assert blob.offset is not None
    for left in (5000, 4096, 10, 0):
        os.truncate(blob.path, blob.offset + left)
        run = subprocess.run(
            [tmp_path / "x", path, str(blob.layer), "1"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 1
        wanted = f"expected {blob.length} bytes at {blob.offset}, found {left}"
        assert run.stderr == f"{blob.path.name}: {wanted}\n"
