"""The C header reads what Python reads, refuses what Python refuses, and touches nothing else."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moepack
from conformance import make_packs, variants
from moepack.packing.shard_index import index_model
from tests.support.c_compiler import compiled
from tests.support.c_readers import Verdict, c_says, output_of, python_says
from tests.support.gguf_builder import F32, moe
from tests.support.models import REAL_MODELS, flip, pack_model
from tests.support.packs import ranked_meanwhile

PACKS = make_packs.FOLDER
VERDICTS: list[dict[str, Any]] = json.loads((PACKS / "verdicts.json").read_text())


# Compiling.


@pytest.mark.parametrize(
    ("compiler", "standard", "flags", "mode"),
    [
        ("gcc", "c99", ("-O2",), "MOEPACK_IMPLEMENTATION"),
        ("gcc", "c17", ("-D_GNU_SOURCE",), "MOEPACK_STATIC"),
        ("clang", "c99", (), "MOEPACK_STATIC"),
        ("g++", "c++17", (), "MOEPACK_STATIC"),
        ("clang++", "c++17", (), "MOEPACK_IMPLEMENTATION"),
    ],
)
def test_two_files_include_the_header_without_a_warning(
    compiler: str, standard: str, flags: tuple[str, ...], mode: str, tmp_path: Path
) -> None:
    """One of them has the functions, or each has them for itself."""
    include = f'#define {mode}\n#include "moepack.h"\n#include "moepack.h"\n'
    second = include if mode == "MOEPACK_STATIC" else '#include "moepack.h"\n'
    second += "int main(void) { return moepack_code_name(MOEPACK_OK)[0] != 'O'; }\n"
    (tmp_path / "first.c").write_text(include)
    (tmp_path / "second.c").write_text(second)
    sources = (tmp_path / "first.c", tmp_path / "second.c")
    options = ("-x", standard.rstrip("1790"), f"-std={standard}", "-Wconversion", *flags)
    run = compiled(compiler, *options, *sources, "-o", tmp_path / "program")
    assert (run.returncode, run.stderr) == (0, "")
    subprocess.run([tmp_path / "program"], check=True)


def test_the_header_has_the_version_of_moepack(tmp_path: Path) -> None:
    source = tmp_path / "one.c"
    source.write_text('#include "moepack.h"\nMOEPACK_VERSION MOEPACK_VERSION_NUMBER\n')
    run = compiled("cc", "-E", "-P", source)
    major, minor, patch = map(int, re.findall(r"\d+", moepack.__version__)[:3])
    number = major * 10000 + minor * 100 + patch
    assert run.stdout.splitlines()[-1] == f'"{moepack.__version__}" {number}'


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
    (verdict,) = c_says(program, "list", [packs[model]])
    assert verdict == python_says(packs[model], reads=True)
    assert verdict.refusal == ""


def test_the_headers_of_shards_are_those_that_python_locates(
    packs: dict[str, Path], program: Path
) -> None:
    paths = [packs[model] for model in REAL_MODELS] + [PACKS / "over-shards"]
    for path, verdict in zip(paths, c_says(program, "headers", paths), strict=True):
        with moepack.open(path) as pack:
            headers = [one for one in pack.index.shard_bytes() if one.shard_offset == 0]
        assert verdict.refusal == ""
        assert verdict.lines == [
            f"header {one.shard} {one.file} {one.offset} {one.length} {one.digest:016x}"
            for one in sorted(headers)
        ]
        assert verdict.lines, path.name
    (verdict,) = c_says(program, "headers", [PACKS / "experts-only"])
    assert verdict == Verdict([], "")


def test_layers_with_gaps_and_large_numbers_are_found(tmp_path: Path, program: Path) -> None:
    """They share a place in the reader's table."""
    model = moe((3, 19, 35, 36, 1059), 2).write(tmp_path / "m.gguf")
    pack_model([model], tmp_path / "pack")
    (verdict,) = c_says(program, "check", [tmp_path / "pack"])
    assert verdict == python_says(tmp_path / "pack")
    assert verdict.refusal == ""


def test_ranges_are_rounded_outwards(program: Path) -> None:
    output_of(program, "round")


def test_what_the_pack_does_not_hold_is_said_so(tiny: Path, program: Path) -> None:
    output = output_of(program, "misuse", tiny)
    assert "SYSTEM experts-00000.bin: cannot read: Bad file descriptor" in output
    assert "NO_SUCH index.bin: layer 0: ffn_exps has 2 experts, not number 2" in output
    assert "NO_SUCH index.bin: there are no experts in layer 4096" in output
    assert f"path {tiny / 'experts-00000.bin'}\n" in output


def test_a_call_that_fails_is_an_error_and_leaves_nothing_behind(
    either: Path, program: Path
) -> None:
    """Memory, a descriptor or a mapping that stayed would be noticed."""
    lines = output_of(program, "starve", either).splitlines()
    assert [line.partition(" cannot ")[2].partition(":")[0] for line in lines] == [
        *("allocate memory", "open", "prepare", "prepare", "allocate memory"),
        *("open", "prepare", "prepare", "map", "allocate memory", "allocate memory"),
        *(("open", "prepare", "prepare") * 2 if either.name == "index" else ()),
        *(("allocate memory",) if either.name == "index" else ()),
    ]


def test_a_pack_that_is_ranked_while_it_is_opened_opens_with_the_new_ranking(
    tiny: Path, tmp_path: Path, program: Path
) -> None:
    path = ranked_meanwhile(tiny, tmp_path / "pack")
    (verdict,) = c_says(program, "list", [path])
    assert not (path / "index.bin").exists()
    assert verdict == python_says(path, reads=True)
    assert verdict.refusal == ""


# Files.


def instead_of(
    name: str, make: Callable[[Path], object] = lambda file: None
) -> Callable[[Path], None]:
    """Put something else in the place of a file, or nothing."""

    def change(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return change


def cut(name: str, length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, length)


DATA = "experts-00001.bin"
NOT_REGULAR = "DAMAGED index.bin: not a regular file"
NO_PACK = "NOT_A_PACK manifest.json: no such file: not a pack"
BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (instead_of("manifest.json"), NO_PACK),
    "nothing": (shutil.rmtree, NO_PACK),
    "no index": (instead_of("index.bin"), "DAMAGED index.bin: the file is missing"),
    "a folder for an index": (
        instead_of("index.bin", Path.mkdir),
        NOT_REGULAR,
    ),
    "a pipe for an index": (
        instead_of("index.bin", os.mkfifo),
        NOT_REGULAR,
    ),
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
    "no data": (instead_of(DATA), f"DAMAGED {DATA}: the file is missing"),
    "a folder for data": (instead_of(DATA, Path.mkdir), f"DAMAGED {DATA}: not a regular file"),
    "a link to itself": (
        instead_of(DATA, lambda file: file.symlink_to(DATA)),
        f"SYSTEM {DATA}: cannot open: ",
    ),
    "data cut in a part": (cut(DATA, 10), f"SHORT_READ {DATA}: expected 32 bytes at 0, found 10"),
    "a changed byte": (lambda path: flip(path / DATA, 31), f"DIGEST {DATA}: ffn_gate_exps.weight"),
}


def test_files_that_are_missing_cut_or_changed_are_named(
    tiny: Path, tmp_path: Path, program: Path
) -> None:
    paths = []
    for number, (damage, _) in enumerate(BAD_FILES.values()):
        paths.append(Path(shutil.copytree(tiny, tmp_path / str(number))))
        damage(paths[-1])
    verdicts = c_says(program, "list", paths)
    for name, verdict in zip(BAD_FILES, verdicts, strict=True):
        assert verdict.refusal.startswith(BAD_FILES[name][1]), (name, verdict.refusal)


def test_symbolic_links_are_followed_and_a_long_path_is_an_error(
    tiny: Path, tmp_path: Path, program: Path
) -> None:
    for name in os.listdir(tiny):
        (tmp_path / name).symlink_to(tiny / name)
    paths = [tmp_path, Path("/" + "x/" * 2100), Path("/" + "x" * 300), tiny / "index.bin"]
    linked, long, odd, file = c_says(program, "list", paths)
    assert linked == python_says(tiny, reads=True)
    assert long.refusal == "BUFFER manifest.json: the path is too long"
    assert odd.refusal == "SYSTEM manifest.json: cannot open: File name too long"
    assert file.refusal.startswith("NOT_A_PACK manifest.json: ")


# Indexes over shards.


def test_what_has_no_digest_is_not_checked(apart: Path, tmp_path: Path, program: Path) -> None:
    shard = tmp_path / "m.gguf"
    shutil.copy(apart / "shard-00001-of-00001.gguf", shard)
    index_model(shard, tmp_path / "with", digests=True)
    index_model(shard, tmp_path / "without")
    with moepack.open(tmp_path / "with") as pack:
        flip(shard, pack.locate(1, 1, "down").offset)
    checked, unknown = c_says(program, "list", [tmp_path / "with", tmp_path / "without"])
    assert checked.refusal.startswith("DIGEST shard-00001-of-00001.gguf: ffn_down_exps.weight at ")
    assert unknown.refusal == ""
    assert unknown == python_says(tmp_path / "without", reads=True)


def test_shards_that_are_not_what_was_indexed_are_refused(
    apart: Path, tmp_path: Path, program: Path
) -> None:
    name = "shard-00001-of-00001.gguf"
    damages: dict[str, Callable[[Path], object]] = {
        f"DIGEST {name}: the shard's header is not what was indexed": lambda path: flip(path, 40),
        f"DAMAGED {name}: not the shard that was indexed": lambda path: os.truncate(path, 1503),
        f"DAMAGED {name}: the file is missing": Path.unlink,
    }
    paths = []
    for number, damage in enumerate(damages.values()):
        paths.append(Path(shutil.copytree(apart, tmp_path / str(number))))  # follows the link
        damage(paths[-1] / name)
    for words, path, verdict in zip(damages, paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal.startswith(words)
        assert python_says(path).refusal


# Packs of the conformance suite, but for what only the manifest says.


def named(verdict: str, *asked_for: str) -> list[Path]:
    """List the packs of a verdict."""
    return [
        PACKS / entry["pack"]
        for entry in VERDICTS
        if entry["verdict"] == verdict and (not asked_for or entry["asked_for"] in asked_for)
        if verdict != variants.OPENING or not entry["needs_manifest"]
    ]


def test_sound_packs_are_read_by_the_c_reader(program: Path) -> None:
    paths = named("sound")
    assert len(paths) >= 15
    for path, verdict in zip(paths, c_says(program, "list", paths), strict=True):
        assert verdict.refusal == "", path.name
        assert verdict == python_says(path, reads=True), path.name
        entry = next(entry for entry in VERDICTS if entry["pack"] == path.name)
        read = [line for line in verdict.lines if line.startswith("bytes ")]
        parts = sum(len(expert["parts"]) for expert in entry["experts"])
        assert len(read) == parts + len(entry["dense"])


@pytest.mark.parametrize(
    ("paths", "least", "mode", "is_refused"),
    [
        (named(variants.OPENING), 50, "check", True),
        (named(variants.USE, "experts", "dense", "origins"), 30, "list", True),
        (named(variants.VERIFICATION) + named(variants.USE, "restoring"), 12, "list", False),
    ],
    ids=["opening", "use", "verification"],
)
def test_the_c_reader_refuses_packs_at_opening_and_at_use(
    paths: list[Path], least: int, mode: str, is_refused: bool, program: Path
) -> None:
    assert len(paths) >= least
    for path, verdict in zip(paths, c_says(program, mode, paths), strict=True):
        assert bool(verdict.refusal) == is_refused, path.name


def test_an_unknown_codec_or_kind_of_file_is_refused_by_name(program: Path) -> None:
    paths = [PACKS / "broken-section-a-codec", PACKS / "broken-file-kind-3"]
    assert [verdict.refusal for verdict in c_says(program, "check", paths)] == [
        "FEATURE index.bin: directory: needs the section 'codec-zstd', which this reader does not"
        " know",
        "FEATURE index.bin: file 0: needs files of kind 3, which this reader does not know",
    ]


# Parts to separate addresses, by as few reads as can be.


@pytest.fixture
def paged(tmp_path: Path) -> Path:
    """Give a pack whose parts are whole pages, as those of nearly all real models are."""
    model = moe((0, 1), 3, ne=(64, 16), type_id=F32, block=(1, 4)).write(tmp_path / "m.gguf")
    pack_model([model], tmp_path / "pack")
    return tmp_path / "pack"


def test_an_expert_of_whole_pages_is_one_read(paged: Path, vectored: Path, program: Path) -> None:
    experts = [(layer, expert) for layer in (0, 1) for expert in range(3)]
    for reader, count in ((vectored, 1), (program, 3)):  # without preadv each part is one
        lines = [f"{layer} {expert}: {count}" for layer, expert in experts]
        assert output_of(reader, "parts", paged).splitlines() == lines


def test_parts_that_lie_apart_are_a_read_each(vectored: Path) -> None:
    output = output_of(vectored, "parts", PACKS / "over-shards")
    assert set(output.splitlines()) == {"0 0: 3", "0 1: 3", "1 0: 3", "1 1: 3"}


def test_parts_are_the_same_at_separate_addresses(
    paged: Path, packs: dict[str, Path], vectored: Path
) -> None:
    """The program compares, at any alignment, with reads that are interrupted and short."""
    sound = [
        path for path in sorted(PACKS.iterdir()) if path.is_dir() and "broken" not in path.name
    ]
    paths = [paged, *(packs[model] for model in REAL_MODELS), *sound]
    for path, verdict in zip(paths, c_says(vectored, "list", paths), strict=True):
        assert verdict == python_says(path, reads=True), path.name
        assert verdict.refusal == "", path.name


@pytest.mark.long
def test_valgrind_finds_nothing(paged: Path, plain: Path) -> None:
    """What sanitizers do not see: bytes that were never written, down to the system calls."""
    if shutil.which("valgrind") is None:
        pytest.skip("there is no valgrind here")
    options = ("-q", "--error-exitcode=9", "--leak-check=full")
    for mode in ("list", "headers"):
        output = output_of(Path("valgrind"), *options, plain, mode, paged, PACKS / "over-shards")
        assert output.count("\nsound\n") == 2


@pytest.mark.parametrize("length", [10, 5000, 12287])
def test_a_vectored_read_of_a_file_that_ends_too_early_is_short(
    length: int, paged: Path, vectored: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(paged, tmp_path / "cut"))
    os.truncate(path / "experts-00000.bin", length)
    found = f"expected 12288 bytes at 0, found {length}"
    first, *_ = output_of(vectored, "parts", path).splitlines()
    assert first == f"SHORT_READ experts-00000.bin: {found}"
