"""moepack_read_parts brings an expert's parts to separate addresses, by as few reads as can be."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.c_readers import c_says, output_of, python_says
from tests.support.gguf_builder import F32, moe
from tests.support.models import REAL_MODELS, pack_model

PACKS = Path(__file__).parents[2] / "conformance" / "packs"


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
    for mode, path in (("list", paged), ("list", PACKS / "over-shards"), ("headers", paged)):
        output = output_of(Path("valgrind"), *options, plain, mode, path)
        assert output.endswith("\nsound\n")


@pytest.mark.parametrize("length", [10, 5000, 12287])
def test_a_vectored_read_of_a_file_that_ends_too_early_is_short(
    length: int, paged: Path, vectored: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(paged, tmp_path / "cut"))
    os.truncate(path / "experts-00000.bin", length)
    found = f"expected 12288 bytes at 0, found {length}"
    first, *_ = output_of(vectored, "parts", path).splitlines()
    assert first == f"SHORT_READ experts-00000.bin: {found}"
