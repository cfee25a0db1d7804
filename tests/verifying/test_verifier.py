"""Verification finds what a packer can do wrong, and what time and disks do."""

import dataclasses
import json
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.errors import SourceError
from moepack.packing import data_files, layout, packer, plan
from moepack.report import junit
from moepack.report.json_text import json_text
from moepack.source import experts, ggml_types
from moepack.source.experts import Experts, Scattered, SourceFamily, SourcePart, Stacked
from moepack.source.shards import open_source
from moepack.verifying.verifier import verify
from tests.support.gguf_builder import F32, moe, split, write_shards
from tests.support.models import REAL_MODELS, first_shard, flip, pack_model, shards_of
from tests.support.pack_draft import sealed

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_a_sound_pack_of_a_real_model_has_no_findings(model: str, packs: dict[str, Path]) -> None:
    digests_only = verify(packs[model])
    assert digests_only.passed
    assert digests_only.compared_length is None
    with_source = verify(packs[model], shards_of(model))
    assert with_source.passed
    with moepack.open(packs[model]) as pack:
        kinds = ((layer, kind) for layer in pack.layers for kind in pack.parts(layer))
        payload = sum(kind.length * pack.expert_count(layer) for layer, kind in kinds)
    assert with_source.compared_length == payload
    files = packs[model].glob("experts-*.bin")
    assert with_source.read_length == sum(file.stat().st_size for file in files)


IK_TYPES = [t for t in ggml_types.TYPES.values() if t.type_id > 42 and t.sliceable]


@pytest.mark.parametrize("known", IK_TYPES, ids=lambda known: known.name)
def test_types_that_only_one_engine_knows_are_packed_and_verified(
    known: ggml_types.GgmlType, tmp_path: Path
) -> None:
    """The verifier knows none of these types: the gap is its only witness, row meta and all."""
    builder = moe(
        (0, 1),
        type_id=known.type_id,
        block=(known.block_count, known.block_length),
        row_meta=known.row_meta_length,
        ne=(256, 256),
    )
    path = builder.write(tmp_path / "m.gguf")
    pack_model([path], tmp_path / "pack")
    assert verify(tmp_path / "pack", [str(path)]).passed


def broken_pack(change: Callable[[Experts], Experts], folder: Path) -> tuple[Path, list[str]]:
    """Pack qwen3moe with a packer that got its experts wrong; return it and the true shards."""
    source = open_source([first_shard("qwen3moe")])
    planned = plan.make(change(experts.find_experts(source)), layout.load("layers"))
    packer.pack(source, planned, folder / "broken")
    return folder / "broken", [shard.path for shard in source.shards]


def with_part(
    model: Experts, layer: int, name: str, change: Callable[[SourcePart], SourcePart]
) -> Experts:
    """Change one part of one layer."""

    def changed(family: SourceFamily) -> SourceFamily:
        parts = tuple(change(p) if p.name == name else p for p in family.parts)
        return dataclasses.replace(family, parts=parts) if family.layer == layer else family

    return dataclasses.replace(model, families=tuple(map(changed, model.families)))


def part_named(model: Experts, layer: int, name: str) -> SourcePart:
    family = next(family for family in model.families if family.layer == layer)
    return next(part for part in family.parts if part.name == name)


def wrong_block_size(model: Experts) -> Experts:
    """As a table would that gives Q4_K 136 bytes a block instead of 144."""

    def change(part: SourcePart) -> SourcePart:
        length = part.length // 144 * 136
        assert isinstance(part.slices, Stacked)
        slices = dataclasses.replace(part.slices, length=length)
        return dataclasses.replace(part, length=length, slices=slices)

    return with_part(model, 0, "ffn_up_exps.weight", change)


def off_by_one_stride(model: Experts) -> Experts:
    def change(part: SourcePart) -> SourcePart:
        assert isinstance(part.slices, Stacked)
        stride = part.slices.length - 1
        return dataclasses.replace(part, slices=dataclasses.replace(part.slices, length=stride))

    return with_part(model, 1, "ffn_gate_exps.weight", change)


def wrong_data_offset(model: Experts) -> Experts:
    def change(part: SourcePart) -> SourcePart:
        assert isinstance(part.slices, Stacked)
        offset = part.slices.offset - 32
        return dataclasses.replace(part, slices=dataclasses.replace(part.slices, offset=offset))

    return with_part(model, 1, "ffn_gate_exps.weight", change)


def swapped_projections(model: Experts) -> Experts:
    gate = part_named(model, 0, "ffn_gate_exps.weight")
    up = part_named(model, 0, "ffn_up_exps.weight")
    assert gate.length == up.length
    model = with_part(model, 0, gate.name, lambda part: dataclasses.replace(part, slices=up.slices))
    return with_part(model, 0, up.name, lambda part: dataclasses.replace(part, slices=gate.slices))


def swapped_experts(model: Experts) -> Experts:
    def change(part: SourcePart) -> SourcePart:
        places = [part.slices.at(expert) for expert in range(16)]
        places[3], places[11] = places[11], places[3]
        return dataclasses.replace(part, slices=Scattered(tuple(places)))

    return with_part(model, 1, "ffn_down_exps.weight", change)


def missing_layer(model: Experts) -> Experts:
    return dataclasses.replace(model, families=model.families[:1])


def missing_part(model: Experts) -> Experts:
    families = tuple(dataclasses.replace(f, parts=f.parts[:2]) for f in model.families)
    return dataclasses.replace(model, families=families)


def missing_expert(model: Experts) -> Experts:
    families = tuple(dataclasses.replace(f, expert_count=15) for f in model.families)
    return dataclasses.replace(model, families=families)


def wrong_type(model: Experts) -> Experts:
    return with_part(
        model, 0, "ffn_up_exps.weight", lambda part: dataclasses.replace(part, type_id=13)
    )


def wrong_shape(model: Experts) -> Experts:
    return with_part(
        model, 0, "ffn_up_exps.weight", lambda part: dataclasses.replace(part, shape=(64, 256))
    )


@pytest.mark.parametrize(
    ("change", "kinds", "layer"),
    [
        (wrong_block_size, {"shape", "bytes"}, 0),
        (off_by_one_stride, {"bytes"}, 1),
        (wrong_data_offset, {"bytes"}, 1),
        (swapped_projections, {"bytes"}, 0),
        (swapped_experts, {"bytes"}, 1),
        (missing_layer, {"missing"}, 1),
        (missing_part, {"missing"}, 0),
        (missing_expert, {"shape"}, 0),
        (wrong_type, {"shape"}, 0),
        (wrong_shape, {"shape"}, 0),
    ],
)
def test_a_packers_mistake_is_found(
    change: Callable[[Experts], Experts], kinds: set[str], layer: int, tmp_path: Path
) -> None:
    """The digests of such a pack are all right: only the verifier's own way to the bytes helps."""
    broken, shards = broken_pack(change, tmp_path)
    assert verify(broken).passed
    report = verify(broken, shards)
    assert {finding.kind for finding in report.findings} == kinds
    assert layer in {finding.layer for finding in report.findings}


def test_a_wrong_size_table_in_the_packer_makes_verification_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packer without the gap check, with a wrong table: the verifier must not share it."""
    path = moe((0,), ne=(256, 256), type_id=12, block=(256, 144)).write(tmp_path / "m.gguf")
    source = open_source([path])
    model = experts.find_experts(source)
    wrong = ggml_types.TYPES[12]._replace(block_length=136)
    monkeypatch.setitem(ggml_types.TYPES, 12, wrong)

    def resized(part: SourcePart) -> SourcePart:
        known = ggml_types.TYPES[part.type_id]
        assert isinstance(part.slices, Stacked)
        length = known.tensor_length(*part.shape)
        return dataclasses.replace(
            part, length=length, slices=dataclasses.replace(part.slices, length=length)
        )

    model = with_part(model, 0, "ffn_up_exps.weight", resized)
    packer.pack(source, plan.make(model, layout.load("layers")), tmp_path / "pack")
    kinds = {finding.kind for finding in verify(tmp_path / "pack", [str(path)]).findings}
    assert kinds == {"shape", "bytes"}


def test_swapped_experts_are_named_with_every_place(tmp_path: Path) -> None:
    broken, shards = broken_pack(swapped_experts, tmp_path)
    findings = verify(broken, shards).findings
    assert {(f.layer, f.expert, f.part, f.file) for f in findings} == {
        (1, expert, "ffn_down_exps.weight", "experts-00001.bin") for expert in (3, 11)
    }
    with moepack.open(broken) as pack:
        where = pack.locate(1, 3, "down")
    assert findings[0].offset is not None
    assert where.offset <= findings[0].offset < where.offset + where.length


@pytest.mark.parametrize("position", ["first", "last"])
def test_a_stale_source_is_found_to_the_byte(position: str, tmp_path: Path) -> None:
    """Same header, same length, one byte of one expert other: a re-quantised or damaged shard."""
    paths = write_shards(split(moe(), 4), tmp_path)
    source = pack_model(paths, tmp_path / "pack")
    family = experts.find_experts(source).families[1]
    part = family.parts[0]
    shard, offset = part.slices.at(2)
    offset += 0 if position == "first" else part.length - 1
    flip(paths[shard], offset)
    (finding,) = verify(tmp_path / "pack", [str(path) for path in paths]).findings
    assert (finding.kind, finding.layer, finding.expert) == ("bytes", family.layer, 2)
    assert finding.part == part.name
    assert f"at byte {offset} of {paths[shard].name}" in finding.message


def test_a_pack_of_another_model_is_not_taken_for_this_one(packs: dict[str, Path]) -> None:
    kinds = {f.kind for f in verify(packs["qwen3moe"], shards_of("ud-mixed")).findings}
    assert {"source", "shape"} <= kinds
    kinds = {f.kind for f in verify(packs["qwen3moe"], shards_of("mixtral")).findings}
    assert {"source", "shape", "missing"} & kinds


def test_another_header_is_another_source(tmp_path: Path) -> None:
    """The experts are the same to the byte, the vocabulary might not be."""
    builder = moe()
    paths = [str(builder.write(tmp_path / "m.gguf"))]
    pack_model([Path(paths[0])], tmp_path / "pack")
    builder.put("general.name", "str", "Built for a tesT").write(tmp_path / "m.gguf")
    (finding,) = verify(tmp_path / "pack", paths).findings
    assert finding.kind == "source"


def test_what_was_left_out_on_purpose_is_not_missing(tmp_path: Path) -> None:
    path = moe().write(tmp_path / "m.gguf")
    pack_model([path], tmp_path / "pack", layers=[0, 2])
    report = verify(tmp_path / "pack", [str(path)])
    assert report.passed
    assert report.layers == (0, 2)


def test_padding_that_is_not_zero_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dirty(self: data_files.DigestingWriter, offset: int) -> None:
        while (missing := offset - self._flushed - self._filled) > 0:
            space = self.space(missing)
            space[:] = b"\xee" * len(space)
            self.advance(len(space))

    monkeypatch.setattr(data_files.DigestingWriter, "pad_to", dirty)
    pack_model([first_shard("qwen3moe")], tmp_path / "pack")
    findings = verify(tmp_path / "pack").findings
    assert {finding.kind for finding in findings} == {"padding"}


def test_every_flipped_bit_of_a_data_file_is_found(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        part = pack.locate(1, 7, "up")
        blob = pack.locate(1, 7)
    padding = part.offset - 1
    assert padding > blob.offset
    for offset, kinds in (
        (part.offset, {"digest", "file"}),
        (part.offset + part.length - 1, {"digest", "file"}),
        (padding, {"padding", "file"}),
    ):
        flip(part.path, offset)
        findings = verify(pack_copy).findings
        assert {finding.kind for finding in findings} == kinds
        named = [f for f in findings if f.kind != "file"]
        assert named[0].file == part.path.name
        if "digest" in kinds:
            assert (named[0].layer, named[0].expert, named[0].part) == (1, 7, part.part)
        else:
            assert named[0].offset == offset
        flip(part.path, offset)
    assert verify(pack_copy).passed


def test_damage_in_several_places_gives_all_findings(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        places = [pack.locate(0, expert, "gate") for expert in range(16)]
    for where in places:
        flip(where.path, where.offset + 1)
    experts_found = {f.expert for f in verify(pack_copy).findings if f.kind == "digest"}
    assert experts_found == set(range(16))


@pytest.mark.parametrize("change", ["cut", "grown", "missing"])
def test_a_data_file_of_another_length_is_found(pack_copy: Path, change: str) -> None:
    path = pack_copy / "experts-00001.bin"
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-5] if change == "cut" else data + bytes(4096))
    findings = verify(pack_copy).findings
    assert {finding.kind for finding in findings} == {"file"}
    assert findings[0].file == path.name


def test_a_damaged_index_and_manifest_are_findings(pack_copy: Path) -> None:
    index = pack_copy / "index.bin"
    flip(index, len(index.read_bytes()) - 1)
    assert {finding.kind for finding in verify(pack_copy).findings} == {"index"}
    flip(index, len(index.read_bytes()) - 1)
    manifest = pack_copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"Qwen3Moe"', '"Qwen3MoE"'))
    assert {finding.kind for finding in verify(pack_copy).findings} == {"manifest"}


def test_a_shard_that_cannot_be_read_is_the_sources_fault(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    shards = shards_of("qwen3moe")
    cut = tmp_path / Path(shards[2]).name
    cut.write_bytes(Path(shards[2]).read_bytes()[:300])
    with pytest.raises(SourceError):
        verify(packs["qwen3moe"], [*shards[:2], str(cut), *shards[3:]])


@pytest.mark.parametrize("shards", [5, [5], None, "x", [{"length": -1, "header_length": -1}]])
def test_a_manifest_that_describes_no_shards_is_a_finding_and_can_be_inspected(
    shards: Any, pack_copy: Path, moepack_command: Command
) -> None:
    path = pack_copy / "manifest.json"
    body = json.loads(path.read_bytes())
    body["source"]["shards"] = shards
    del body["manifest_digest"]
    path.write_bytes(sealed(json.dumps(body, indent=2)))
    findings = verify(pack_copy, first_shard("qwen3moe")).findings
    assert {finding.kind for finding in findings} == {"source"}
    run = moepack_command("inspect", pack_copy)
    assert run.returncode == 0, run.stderr


def test_the_source_may_be_a_shard_a_folder_or_all_shards_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    paths = write_shards(split(moe(), 4), tmp_path / "model")
    pack_model(paths, tmp_path / "pack")
    renamed = [path.rename(path.with_name(f"{9 - n}.gguf")) for n, path in enumerate(paths)]
    assert verify(tmp_path / "pack", sorted(renamed)).passed
    for path, named in zip(paths, renamed, strict=True):
        named.rename(path)
    for source in (paths[1], str(paths[0]), tmp_path / "model", paths[::-1], [paths[2]]):
        assert verify(tmp_path / "pack", source).passed
    paths[1].unlink()
    with pytest.raises(SourceError, match="1 of 4 shards are missing"):
        verify(tmp_path / "pack", paths[0])


@pytest.mark.parametrize("data", [b"", b"<html>", bytes(100), b"GGUF", b"GGUF" + b"\xff" * 100])
def test_what_is_no_gguf_is_the_sources_fault(data: bytes, pack_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(SourceError, match=r"m\.gguf"):
        verify(pack_copy, tmp_path / "m.gguf")


def test_the_report_has_stable_fields(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        where = pack.locate(0, 2, "up")
    flip(where.path, where.offset)
    report = verify(pack_copy, shards_of("qwen3moe"))
    body: dict[str, Any] = json.loads(json_text(report))
    assert set(body) == {
        *("passed", "path", "findings", "layers", "blob_count", "part_count"),
        *("read_length", "compared_length"),
    }
    digest = next(finding for finding in body["findings"] if finding["kind"] == "digest")
    assert (digest["layer"], digest["expert"]) == (0, 2)
    assert (digest["file"], digest["offset"]) == (where.path.name, where.offset)


def test_junit_has_a_test_for_each_layer_and_names_the_failures(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        where = pack.locate(1, 2, "up")
    flip(where.path, where.offset)
    suite = ElementTree.fromstring(junit.encode(verify(pack_copy)))
    cases = {case.get("name"): case.find("failure") for case in suite}
    assert set(cases) == {"pack", "layer 0", "layer 1"}
    assert cases["layer 0"] is None
    failure = cases["layer 1"]
    assert failure is not None
    assert "expert 2 ffn_up_exps.weight" in (failure.text or "")
    assert suite.get("failures") == "2"


def test_scales_of_four_bytes_are_compared_too(tmp_path: Path) -> None:
    builder = moe((0,)).tensor("blk.0.ffn_up_exps.scale", (4,), F32, 16)
    path = builder.write(tmp_path / "m.gguf")
    pack_model([path], tmp_path / "pack")
    assert verify(tmp_path / "pack", [str(path)]).passed
    offset = experts.find_experts(open_source([path])).families[0].parts
    scale = next(part for part in offset if part.name.endswith("scale"))
    flip(path, scale.slices.at(3)[1])
    (finding,) = verify(tmp_path / "pack", [str(path)]).findings
    assert (finding.part, finding.expert) == ("ffn_up_exps.scale", 3)
