"""Verification finds what a packer can do wrong, and what time and disks do."""

import contextlib
import dataclasses
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

import moepack
from moepack.errors import PackError, SourceError
from moepack.packing import layout, packer, plan
from moepack.packing.restore import restore
from moepack.packing.source_identity import describe_shard, describe_source
from moepack.source import experts, ggml_types
from moepack.source.dense import find_dense
from moepack.source.experts import Experts, Scattered, SourceFamily, SourcePart, Stacked
from moepack.source.shards import Source, open_source
from moepack.verifying import extents, scan
from moepack.verifying.verifier import verify
from tests.support.amounts import amounts
from tests.support.gguf_builder import F32, moe, split, write_shards
from tests.support.models import REAL_MODELS, first_shard, flip, pack_model, shards_of
from tests.support.pack_draft import Draft, moved

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_a_sound_pack_of_a_real_model_has_no_findings(model: str, packs: dict[str, Path]) -> None:
    digests_only = verify(packs[model])
    assert digests_only.passed
    assert digests_only.compared_length is None
    shards = shards_of(model)
    with_source = verify(packs[model], shards)
    assert with_source.passed
    assert with_source.headline is None
    assert with_source.compared_length == sum(Path(shard).stat().st_size for shard in shards)
    files = packs[model].glob("*.bin")
    data_length = sum(file.stat().st_size for file in files if file.name != "index.bin")
    assert with_source.read_length == with_source.data_length == data_length


def test_a_pack_of_experts_alone_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    pack_model([first_shard("mixtral")], tmp_path / "pack", experts_only=True)
    report = verify(tmp_path / "pack", first_shard("mixtral"))
    assert report.passed
    with moepack.open(tmp_path / "pack") as pack:
        assert report.compared_length == pack.shape.expert_length


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
    found = experts.find_experts(source)
    write_pack(source, found, change(found), folder / "broken")
    return folder / "broken", [shard.path for shard in source.shards]


def write_pack(source: Source, found: Experts, wrong: Experts, target: Path) -> None:
    planned = plan.make(wrong, layout.load("layers"), dense=find_dense(source, found))
    shards = tuple(map(describe_shard, source.shards))
    described = describe_source(source, experts.shape_of(source, found), shards)
    packer.pack(source, described, planned, target)


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
    ("change", "kinds", "layer", "kinds_alone"),
    [
        (wrong_block_size, {"record", "shape"}, 0, {"record"}),
        (off_by_one_stride, {"origin", "bytes"}, 1, {"origin"}),
        (wrong_data_offset, {"origin", "bytes"}, 1, {"origin"}),
        (swapped_projections, {"origin", "bytes"}, 0, set()),
        (swapped_experts, {"origin", "bytes"}, 1, set()),
        (missing_layer, {"missing"}, 1, set()),
        (missing_part, {"missing"}, 0, set()),
        (missing_expert, {"shape"}, 0, set()),
        (wrong_type, {"record", "shape"}, 0, {"record"}),
        (wrong_shape, {"record", "shape"}, 0, {"record"}),
    ],
)
def test_a_packers_mistake_is_found(
    change: Callable[[Experts], Experts],
    kinds: set[str],
    layer: int,
    kinds_alone: set[str],
    tmp_path: Path,
) -> None:
    """The digests of such a pack are all right: only the verifier's own way to the bytes helps."""
    broken, shards = broken_pack(change, tmp_path)
    assert {finding.kind for finding in verify(broken).findings} == kinds_alone
    report = verify(broken, shards)
    assert {finding.kind for finding in report.findings} == kinds
    assert layer in {finding.layer for finding in report.findings}
    assert "a mistake of the program that wrote it" in (report.headline or "")


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
    write_pack(source, model, model, tmp_path / "pack")
    kinds = {finding.kind for finding in verify(tmp_path / "pack", [str(path)]).findings}
    assert kinds == {"record", "shape"}


def test_swapped_experts_are_named_with_every_place(tmp_path: Path) -> None:
    broken, shards = broken_pack(swapped_experts, tmp_path)
    findings = [f for f in verify(broken, shards).findings if f.kind == "bytes"]
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
    assert f"at byte {offset:,} of {paths[shard].name}" in finding.message


def test_another_header_is_another_source(tmp_path: Path) -> None:
    """The experts are the same to the byte, the vocabulary might not be."""
    builder = moe()
    paths = [str(builder.write(tmp_path / "m.gguf"))]
    pack_model([Path(paths[0])], tmp_path / "pack")
    builder.put("general.name", "str", "Built for a tesT").write(tmp_path / "m.gguf")
    report = verify(tmp_path / "pack", paths)
    assert {(f.kind, f.file) for f in report.findings} == {
        ("source", "m.gguf"),
        ("bytes", "dense.bin"),
    }
    assert report.headline == "these shards were changed since packing: m.gguf"


def test_what_was_left_out_on_purpose_is_not_missing(tmp_path: Path) -> None:
    path = moe().write(tmp_path / "m.gguf")
    pack_model([path], tmp_path / "pack", layers=[0, 2])
    report = verify(tmp_path / "pack", [str(path)])
    assert report.passed
    assert report.layers == (0, 2)


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
    (finding,) = findings
    assert (finding.kind, finding.file) == ("file", path.name)
    assert ("1 of 16 blobs and tensors in it are cut" in finding.message) == (change == "cut")


def test_a_manifest_that_cannot_be_read_is_a_finding(
    pack_copy: Path, moepack_command: Command
) -> None:
    (pack_copy / "manifest.json").write_text("{")
    (finding,) = verify(pack_copy).findings
    assert (finding.kind, finding.file) == ("manifest", "manifest.json")
    assert finding.message.startswith("not JSON")
    junit = pack_copy / "findings.xml"
    run = moepack_command("verify", pack_copy, "--json", "--junit", junit)
    assert run.returncode == 5
    assert '"kind": "manifest"' in run.stdout
    assert "not JSON" in junit.read_text()
    (pack_copy / "manifest.json").write_text('{"format": "moepack", "format_version": 2}')
    with pytest.raises(PackError, match="unknown format version"):
        verify(pack_copy)


def test_an_index_that_is_missing_is_one_finding(pack_copy: Path) -> None:
    (pack_copy / "index.bin").unlink()
    (finding,) = verify(pack_copy).findings
    assert (finding.kind, finding.file) == ("index", "index.bin")
    assert finding.message == "the index is missing"


def test_a_damaged_index_and_manifest_are_findings(pack_copy: Path) -> None:
    index = pack_copy / "index.bin"
    flip(index, len(index.read_bytes()) - 1)
    findings = verify(pack_copy).findings
    assert {finding.kind for finding in findings} == {"index"}
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model with padding everywhere, some of it not zero, and pack it into `pack`."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "model").mkdir()
    builder = moe((0, 1), 3, ne=(5, 3), type_id=F32, block=(1, 4))
    builder.tensor("blk.0.ffn_up_exps.scale", (3,), F32, 12)
    builder.tensor("blk.1.ffn_norm.bias", (7,), F32, 28)
    paths = write_shards(split(builder, 4), folder / "model")
    gap = open_source(paths).shards[0].tensors[1]
    flip(paths[0], gap.offset + gap.length)
    pack_model(paths, folder / "pack", layout_name="hot-first")
    return folder


@pytest.fixture(params=["usual", "small"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be read as they are, or in small runs of smaller pieces, as large ones are."""
    if request.param == "small":
        monkeypatch.setattr(scan, "PIECE_LENGTH", 40)
        monkeypatch.setattr(extents, "RUN_LENGTH", 100)


@pytest.mark.long
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("count", amounts(40, 400))
def test_every_flipped_bit_of_a_pack_is_found(small: Path, tmp_path: Path, count: int) -> None:
    """Of parts, tensors, headers and padding, of the index and of the manifest."""
    pack = Path(shutil.copytree(small / "pack", tmp_path / "pack"))
    assert verify(pack).passed
    random = Random(1)
    for path in sorted(pack.iterdir()):
        data = path.read_bytes()
        offsets = {0, len(data) - 1, *random.sample(range(len(data)), min(count, len(data)))}
        if path.name == "dense.bin":
            offsets |= {start + step for start in range(0, len(data), 4096) for step in (0, 1, 20)}
        for offset in offsets:
            changed = bytearray(data)
            changed[offset] ^= 1 << random.randrange(8)
            path.write_bytes(changed)
            try:
                report = verify(pack, threads=1)
            except PackError:
                assert path.name == "manifest.json"
            else:
                assert report.findings, (path.name, offset)
                assert report.passed is False
                if path.name not in ("index.bin", "manifest.json"):
                    assert report.findings[0].file == path.name
                    assert report.headline == f"a damaged file: {path.name}"
        path.write_bytes(data)
    assert verify(pack).passed


@pytest.mark.long
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("count", amounts(50, 500))
def test_every_flipped_bit_of_the_source_is_found(small: Path, tmp_path: Path, count: int) -> None:
    """Of expert tensors, dense tensors, headers, and padding, whether it was zero or not."""
    model = Path(shutil.copytree(small / "model", tmp_path / "model"))
    assert verify(small / "pack", model).passed
    random = Random(2)
    for number, path in enumerate(sorted(model.iterdir())):
        data = path.read_bytes()
        start = open_source(model).shards[number].data_offset
        chosen = random.sample(range(len(data)), min(count, len(data)))
        for offset in {start - 1, start, len(data) - 1, *chosen}:
            changed = bytearray(data)
            changed[offset] ^= 1 << random.randrange(8)
            path.write_bytes(changed)
            if offset >= start:
                assert verify(small / "pack", model, threads=1).findings, (path.name, offset)
                continue
            with contextlib.suppress(SourceError):  # a header that says nonsense
                assert verify(small / "pack", model, threads=1).findings, (path.name, offset)
        path.write_bytes(data)
    assert verify(small / "pack", model).passed


def test_a_dense_tensor_and_a_header_that_differ_are_named(small: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small / "model", tmp_path / "model"))
    source = open_source(model)
    shard, tensor = next(held for held in source.tensors() if held[1].name.endswith("norm.bias"))
    flip(Path(source.shards[shard].path), tensor.offset + 5)
    (finding,) = verify(small / "pack", model).findings
    assert (finding.kind, finding.tensor, finding.file) == ("bytes", tensor.name, "dense.bin")
    assert finding.message.startswith("byte 5 of it is ")


def test_padding_of_the_source_that_the_pack_does_not_hold_is_missing(
    small: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(small / "model", tmp_path / "model"))
    shard = open_source(model).shards[1]
    end = shard.tensors[1].offset + shard.tensors[1].length
    assert end < shard.tensors[2].offset
    flip(Path(shard.path), end + 2)
    (finding,) = verify(small / "pack", model).findings
    assert (finding.kind, finding.offset) == ("missing", end + 2)
    assert finding.file == Path(shard.path).name


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["n" * 255, "ä" * 127 + "n"])
def test_a_tensor_has_a_name_of_up_to_255_bytes(name: str, tmp_path: Path) -> None:
    builder = moe((0,), 2, ne=(4, 2), type_id=F32, block=(1, 4)).tensor(name, (4,), F32, 16)
    model = builder.write(tmp_path / "m.gguf")
    pack_model([model], tmp_path / "pack")
    assert verify(tmp_path / "pack", model).passed
    with moepack.open(tmp_path / "pack") as pack:
        assert pack.locate_dense(name).length == 16
    restore(tmp_path / "pack", tmp_path / "restored")
    assert (tmp_path / "restored" / "m.gguf").read_bytes() == model.read_bytes()
    longer = moe((0,), 2, ne=(4, 2), type_id=F32, block=(1, 4)).tensor(name + "n", (4,), F32, 16)
    with pytest.raises(SourceError, match="too long"):
        pack_model([longer.write(tmp_path / "longer.gguf")], tmp_path / "longer")


def test_a_tensor_without_bytes_may_lie_anywhere(tmp_path: Path) -> None:
    """In the middle of a blob, and of another tensor of its shard, it overlaps nothing."""
    builder = moe((0, 1), 3, ne=(256, 64)).tensor("nothing", (0,), F32, 0)
    path = builder.write(tmp_path / "m.gguf")
    pack_model([path], tmp_path / "pack")
    draft = Draft(tmp_path / "pack")
    with moepack.open(draft.path) as pack:
        tensors = list(pack.index.tensors())
    number = next(n for n, tensor in enumerate(tensors) if tensor.name == "nothing")
    blob = draft.get("blob", 1)
    inside = max(tensors, key=lambda tensor: tensor.length)
    assert min(blob.length, inside.length) > 4096
    draft.set(
        *("tensor", number),
        file=blob.file,
        offset=blob.offset + 4096,
        shard_offset=inside.shard_offset + 32,
    )
    draft.save()
    assert verify(draft.path).passed
    restore(draft.path, tmp_path / "restored")
    assert (tmp_path / "restored" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("kind", "number", "steps"),
    [
        ("part_kind", 0, {"shard_offset": 4}),
        ("part_kind", 0, {"stride": 4}),
        ("tensor", 1, {"shard_offset": -32}),
        ("tensor", 1, {"shard": 1}),
    ],
)
def test_an_origin_that_is_wrong_is_found(
    kind: str, number: int, steps: dict[str, int], small: Path, tmp_path: Path
) -> None:
    """The pack's own bytes are all right: only where they came from is not."""
    draft = Draft(Path(shutil.copytree(small / "pack", tmp_path / "pack")))
    moved(kind, number, **steps)(draft)
    draft.save()
    findings = verify(draft.path, small / "model").findings
    assert {finding.kind for finding in findings} == {"origin"}
    assert any("it lies at byte" in finding.message for finding in findings)


def test_tensors_that_only_one_side_has_are_found(small: Path, tmp_path: Path) -> None:
    draft = Draft(Path(shutil.copytree(small / "pack", tmp_path / "pack")))
    name = draft.get("tensor", 1).name
    draft.set("tensor", 1, name=name.replace(b"blk.0", b"blk.7"))
    draft.save()
    findings = verify(draft.path, small / "model").findings
    assert {(finding.kind, finding.tensor) for finding in findings} == {
        ("missing", "blk.0.attn_norm.weight"),
        ("surplus", "blk.7.attn_norm.weight"),
    }


def test_a_header_length_that_is_wrong_is_found(small: Path, tmp_path: Path) -> None:
    """The SHA-256 of the shorter header is right: only the shard knows where the header ends."""
    draft = Draft(Path(shutil.copytree(small / "pack", tmp_path / "pack")))
    shard = draft.body["source"]["shards"][0]
    shard["header_length"] -= 32
    data = (small / "model" / shard["name"]).read_bytes()
    shard["header_sha256"] = hashlib.sha256(data[: shard["header_length"]]).hexdigest()
    draft.save()
    kinds = [finding.kind for finding in verify(draft.path, small / "model").findings]
    assert kinds == ["missing", "source"]
