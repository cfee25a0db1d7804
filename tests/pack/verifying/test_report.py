"""Reports of verifications: one headline, findings, stable fields."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.pack.verifying.report import Finding, Findings
from moepack.pack.verifying.verifier import verify
from moepack.report import verification_text
from moepack.report.facts import json_text
from tests.support.gguf_builder import moe, split, write_shards
from tests.support.models import flip, pack_model, shards_of
from tests.support.pack_draft import Draft
from tests.support.warm_command import Run


def test_another_model_is_one_headline_and_its_bytes_are_not_compared(
    packs: dict[str, Path],
) -> None:
    report = verify(packs["qwen3moe"], shards_of("granite"))
    assert report.headline is not None
    assert report.headline.startswith("this is another model: ")
    assert "(granite_swa, 4 shards)" in report.headline
    assert "(qwen3moe, 6 shards)" in report.headline
    assert {finding.kind for finding in report.findings} >= {"source", "shape", "missing"}
    assert "bytes" not in {finding.kind for finding in report.findings}
    assert (report.passed, report.compared_length) == (False, 0)
    assert report.not_looked_at == ("the bytes of the source",)
    lines = verification_text.report(report).splitlines()
    assert lines[0] == report.headline
    assert len(lines) < 30 < len(report.findings)
    assert max(map(len, lines)) < 200
    assert not any(mark in "\n".join(lines) for mark in ("((", "None", "', '"))


def test_the_same_model_in_other_types_is_another_version_of_it(packs: dict[str, Path]) -> None:
    """Both were made of one model, and have as many shards."""
    report = verify(packs["qwen3moe"], shards_of("ud-mixed"))
    assert (report.headline or "").startswith("this is another version of the model: ")
    messages = [finding.message for finding in report.findings if finding.kind == "shape"]
    assert any("16 experts of 256 x 64 Q4_K, 9,216 bytes" in text for text in messages), messages


def test_a_shard_that_was_written_anew_was_changed(tmp_path: Path) -> None:
    builder = moe()
    paths = write_shards(split(builder, 4), tmp_path)
    pack_model(paths, tmp_path / "pack")
    data = paths[1].read_bytes()
    paths[1].write_bytes(data + bytes(-len(data) % 32 or 32))
    with pytest.raises(moepack.SourceError):
        verify(tmp_path / "pack", paths)
    paths[1].write_bytes(data)
    builder.put("general.name", "str", "Another name of it")
    write_shards(split(builder, 4), tmp_path)
    report = verify(tmp_path / "pack", paths)
    assert report.headline == f"these shards were changed since packing: {paths[0].name}"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (moepack.pack_model, "though the pack's digests are right"),
        (moepack.index_model, "without digests, nobody knows which"),
    ],
)
def test_other_bytes_are_the_packers_or_the_shards(
    make: Callable[[Path, Path], object], words: str, tmp_path: Path
) -> None:
    path = moe().write(tmp_path / "m.gguf")
    make(path, tmp_path / "pack")
    copy = Path(shutil.copy(path, tmp_path / "copy.gguf"))
    flip(copy, path.stat().st_size - 200)
    report = verify(tmp_path / "pack", copy)
    assert {finding.kind for finding in report.findings} == {"bytes"}
    assert words in (report.headline or "")


@pytest.mark.parametrize(("packed", "compared"), [(1, 3), (3, 1)])
def test_the_same_tensors_split_otherwise_are_not_called_changed(
    packed: int, compared: int, tmp_path: Path
) -> None:
    builder = moe()
    paths = {1: [builder.write(tmp_path / "m.gguf")], 3: []}
    paths[3] = write_shards(split(builder, 5), tmp_path / "split")
    assert len(paths[3]) == 3
    pack_model(paths[packed], tmp_path / "pack")
    words = f"{compared} shard{'s' * (compared > 1)}, packed from {packed}"
    report = verify(tmp_path / "pack", paths[compared])
    assert report.headline == f"the same tensors, split otherwise: {words}"
    some = verify(tmp_path / "pack", paths[compared], layers=[0])
    assert some.headline == f"the source is split otherwise: {words}"
    flip(paths[compared][-1], paths[compared][-1].stat().st_size - 200)
    report = verify(tmp_path / "pack", paths[compared])
    assert report.headline == f"the source is split otherwise: {words}"


def test_a_damaged_pack_is_that_also_beside_its_source(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        places = [pack.locate(layer, 3, "up") for layer in (0, 1)]
    flip(places[0].path, places[0].offset)
    report = verify(pack_copy, shards_of("qwen3moe"))
    assert [finding.kind for finding in report.findings] == ["bytes", "digest"]
    assert report.headline == "a damaged file: experts-00000.bin"
    flip(places[1].path, places[1].offset)
    flip(places[1].path, places[1].offset + places[1].length)
    assert verify(pack_copy).headline == (
        "damaged files: experts-00000.bin, experts-00001.bin, in 3 places"
    )


def test_a_headline_names_three_files_and_counts_the_rest(tmp_path: Path) -> None:
    pack_model([moe((0, 1, 2, 3)).write(tmp_path / "m.gguf")], tmp_path / "pack")
    paths = sorted((tmp_path / "pack").glob("experts-*.bin"))
    names = "experts-00000.bin, experts-00001.bin, experts-00002.bin"
    for path in paths[:3]:
        flip(path, 0)
    assert verify(tmp_path / "pack").headline == f"damaged files: {names}, in 3 places"
    flip(paths[3], 0)
    assert verify(tmp_path / "pack").headline == f"damaged files: {names} and 1 more, in 4 places"


def test_index_and_manifest_of_two_packs_do_not_belong_together(
    packs: dict[str, Path], pack_copy: Path
) -> None:
    (pack_copy / "index.bin").write_bytes((packs["granite"] / "index.bin").read_bytes())
    report = verify(pack_copy)
    assert report.headline == "index.bin and manifest.json do not belong together"
    (pack_copy / "index.bin").write_bytes((packs["qwen3moe"] / "index.bin").read_bytes())
    flip(pack_copy / "index.bin", 4000)
    assert verify(pack_copy).headline == "a damaged file: index.bin"
    flip(pack_copy / "index.bin", 4000)
    draft = Draft(pack_copy)
    draft.body["files"].pop()
    draft.save_manifest()
    assert verify(pack_copy).headline == "index.bin and manifest.json do not belong together"
    path = pack_copy / "manifest.json"
    path.write_text(path.read_text().replace('"Qwen3Moe"', '"Qwen3MoE"'))
    assert verify(pack_copy).headline == "a damaged file: manifest.json"


def test_few_findings_of_each_kind_are_shown_and_all_are_kept(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        places = [pack.locate(0, expert, "gate") for expert in range(16)]
    for where in places:
        flip(where.path, where.offset + 1)
    report = verify(pack_copy)
    assert len(report.findings) == 16
    lines = verification_text.report(report).splitlines()
    assert lines[:2] == [report.headline, "  digest: 16 findings"]
    assert lines[2].startswith("    layer 0 expert 0 ffn_gate_exps.weight in experts-00000.bin at ")
    assert lines[5] == "    … and 13 more: -v lists all"
    assert lines[6].startswith(f"{pack_copy}: 16 findings. 32 blobs, ")
    assert len(lines) == 7


def test_the_report_has_stable_fields(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        where = pack.locate(0, 2, "up")
    flip(where.path, where.offset)
    report = verify(pack_copy, shards_of("qwen3moe"))
    body: dict[str, Any] = json.loads(json_text(report))
    assert set(body) == {
        *("passed", "headline", "path", "findings", "layers", "checked_layers"),
        *("blob_count", "part_count", "tensor_count"),
        *("checked_blob_count", "checked_tensor_count"),
        *("read_length", "data_length", "compared_length", "sha256_count", "gguf_py_length"),
        *("not_looked_at", "mirror_length", "compared_with"),
    }
    digest = next(finding for finding in body["findings"] if finding["kind"] == "digest")
    assert set(digest) == {
        *("kind", "message", "layer", "expert", "part", "tensor", "file", "offset")
    }
    assert (digest["layer"], digest["expert"]) == (0, 2)
    assert (digest["file"], digest["offset"]) == (where.path.name, where.offset)


def test_the_command_says_what_the_library_does(pack_copy: Path, cli: Run) -> None:
    shards = shards_of("qwen3moe")
    run = cli("verify", pack_copy, "--source", shards[0])
    assert run.returncode == 0, run.stderr
    assert f"{pack_copy}: sound. 32 blobs, 96 parts, " in run.stdout
    options = ("--layers", "1", "--part", "1/2", "--json")
    run = cli("verify", pack_copy, *options)
    assert run.returncode == 0, run.stderr
    body = json.loads(run.stdout)
    assert (body["passed"], body["checked_layers"]) == (None, [])
    assert body["checked_blob_count"] < 16


def test_findings_come_by_layer_expert_part_and_offset_those_of_the_pack_first() -> None:
    ordered = (
        Finding("b", ""),
        Finding("b", "", layer=0),
        Finding("a", "", layer=0, expert=0),
        Finding("a", "", layer=0, expert=0, part="a", offset=0),
        Finding("b", "", layer=0, expert=0, part="a"),
        Finding("c", "", layer=0, expert=0, part="a", offset=0),
        Finding("a", "", layer=0, expert=0, part="b"),
    )
    findings = Findings()
    findings.all = [*reversed(ordered)]
    assert findings.in_order() == ordered
