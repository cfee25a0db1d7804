"""Packs of later versions of the format are read, or refused by what they need."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from moepack.format import records
from tests.support.c_readers import c_says, python_says
from tests.support.grown_packs import NewSection, grow

SECTIONS = (*records.NEEDED_SECTIONS, "tensors", "shard_bytes")
LONGER = {name: 4 if name == "ranks" else 8 for name in SECTIONS}

LATER: dict[str, dict[str, Any]] = {
    "a longer header": {"header": 8},
    "a directory that ends at byte 65,536": {"header": (1 << 16) - 56 - 8 * 48},
    "longer records of the directory": {"directory": 16},
    **{f"longer {name}": {"longer": {name: 5 * by}} for name, by in LONGER.items()},
    "new sections": {
        "new": [
            NewSection("fourth", before="blobs"),
            NewSection("in-the.middle_", before="ranks"),
            NewSection("no-records", 0),
            NewSection("bytes", 77, 1),
            NewSection("last", 1, 1 << 16),
        ]
    },
    "as many sections as may be": {"new": [NewSection(f"s{n}", 1, 1) for n in range(248)]},
    "all": {
        **{"header": 64, "directory": 8, "longer": LONGER},
        "new": [NewSection("new", before="blobs"), NewSection("newer")],
    },
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
def test_a_pack_of_a_later_version_is_read(
    later: dict[str, Any], either: Path, tmp_path: Path, program: Path
) -> None:
    path = Path(shutil.copytree(either, tmp_path / "pack"))
    before = (path / "index.bin").read_bytes()
    grow(path, **later)
    assert (path / "index.bin").read_bytes() != before
    (found,) = c_says(program, "list", [path])
    assert found == python_says(path, reads=True) == python_says(either, reads=True)
    assert found.refusal == ""


def test_a_section_that_is_needed_and_not_known_is_refused_by_name(
    either: Path, tmp_path: Path, program: Path
) -> None:
    path = Path(shutil.copytree(either, tmp_path / "pack"))
    grow(path, new=[NewSection("signs", is_required=True, before="parts")])
    (found,) = c_says(program, "check", [path])
    words = "directory: needs the section 'signs', which this reader does not know"
    assert found.refusal == f"FEATURE index.bin: {words}"
    assert words in python_says(path).refusal
