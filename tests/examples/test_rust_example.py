"""The reader in Rust reads what Python reads, and gives the conformance packs their verdicts."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moepack
from conformance import make_packs, variants
from tests.support.c_compiler import compiled
from tests.support.children import run_command
from tests.support.example_output import parts_of
from tests.support.packs import ranked_meanwhile

SOURCE = Path(__file__).parents[2] / "examples" / "read_pack.rs"
PACKS = make_packs.FOLDER
RANK_MEANWHILE = Path(__file__).parents[1] / "support" / "rank_meanwhile.c"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def read_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the example once; arithmetic that overflows is an error."""
    if shutil.which("rustc") is None:
        pytest.skip("there is no rustc here")
    target = tmp_path_factory.mktemp("rust") / "read_pack"
    flags = ("--edition", "2021", "-O", "-D", "warnings", "-C", "overflow-checks=on")
    run = run_command("rustc", *flags, SOURCE, "-o", target)
    if "is_none_or" in run.stderr:
        pytest.skip("rustc is older than 1.82")
    assert run.returncode == 0, run.stderr
    return target


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


def test_sound_packs_are_read(read_pack: Path) -> None:
    packs = [entry for entry in verdicts() if entry["verdict"] == "sound"]
    assert len(packs) >= 25
    for entry in packs:
        part_count = sum(len(expert["parts"]) for expert in entry["experts"])
        counts = f"{len(entry['experts'])} experts, {part_count} parts"
        run = run_command(read_pack, PACKS / entry["pack"])
        assert run.stdout == f"readable: {counts}, {len(entry['dense'])} tensors\n", entry["pack"]


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
