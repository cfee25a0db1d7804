"""moepack.h gives the conformance packs their verdicts, but for what only the manifest says."""

import json
from pathlib import Path
from typing import Any

from conformance import make_packs, variants
from tests.support.c_readers import c_says

PACKS = make_packs.FOLDER
VERDICTS: list[dict[str, Any]] = json.loads((PACKS / "verdicts.json").read_text())


def named(verdict: str, *asked_for: str) -> list[Path]:
    """List the packs of a verdict."""
    return [
        PACKS / told["pack"]
        for told in VERDICTS
        if told["verdict"] == verdict and (not asked_for or told["asked_for"] in asked_for)
        if verdict != variants.OPENING or not told["needs_manifest"]
    ]


def test_sound_packs_are_read_by_the_c_reader(program: Path) -> None:
    paths = named("sound")
    assert len(paths) >= 15
    for path, verdict in zip(paths, c_says(program, "list", paths), strict=True):
        assert verdict.refusal == "", path.name
        told = next(told for told in VERDICTS if told["pack"] == path.name)
        read = [line for line in verdict.found if line.startswith("bytes ")]
        parts = sum(len(expert["parts"]) for expert in told["experts"])
        assert len(read) == parts + len(told["dense"])


def test_the_c_reader_refuses_what_is_refused_at_opening(program: Path) -> None:
    paths = named(variants.OPENING)
    assert len(paths) >= 50
    for path, verdict in zip(paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal, path.name


def test_the_c_reader_refuses_what_is_refused_at_use(program: Path) -> None:
    paths = named(variants.USE, "experts", "dense", "origins")
    assert len(paths) >= 30
    for path, verdict in zip(paths, c_says(program, "list", paths), strict=True):
        assert verdict.refusal, path.name


def test_the_c_reader_reads_what_only_verification_finds(program: Path) -> None:
    paths = named(variants.VERIFICATION) + named(variants.USE, "restoring")
    assert len(paths) >= 12
    for path, verdict in zip(paths, c_says(program, "list", paths), strict=True):
        assert verdict.refusal == "", path.name
