"""moepack.h gives the conformance packs their verdicts, but for what only the manifest says."""

import json
from pathlib import Path
from typing import Any

import pytest

from conformance import make_packs, variants
from tests.support.c_readers import c_says, python_says

PACKS = make_packs.FOLDER
VERDICTS: list[dict[str, Any]] = json.loads((PACKS / "verdicts.json").read_text())


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
