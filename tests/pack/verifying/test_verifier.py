"""Verification finds mistakes of packers, and damage by time and disks."""

import contextlib
import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import moepack
from moepack.common.errors import PackError, SourceError
from moepack.pack.opening.open_model import describe_shard, describe_source
from moepack.pack.verifying import checked_pack, scan
from moepack.pack.verifying.verifier import verify
from moepack.packing.plan import layout, plan
from moepack.packing.restore import restore
from moepack.packing.shard_index import index_model
from moepack.packing.writing import packer
from moepack.packing.writing.planned_pack import PlannedPack
from moepack.packing.writing.target import open_target
from moepack.report import verification_text
from moepack.source import experts
from moepack.source.dense import find_dense
from moepack.source.experts import Experts
from moepack.source.shards import open_source
from tests.support.amounts import amounts
from tests.support.gguf_builder import F32, moe, split, write_shards
from tests.support.models import REAL_MODELS, first_shard, flip, pack_model, shards_of
from tests.support.pack_draft import Draft, moved
from tests.support.packs import families_model
from tests.support.warm_command import Run


@pytest.mark.parametrize("model", REAL_MODELS)
def test_a_sound_pack_of_a_real_model_has_no_findings(model: str, packs: dict[str, Path]) -> None:
    digests_only = verify(packs[model])
    assert digests_only.passed
    assert digests_only.compared_length is None
    shards = shards_of(model)
    with_source = verify(packs[model], shards, with_gguf_py=True)
    assert (with_source.passed, with_source.headline, with_source.findings) == (True, None, ())
    assert with_source.compared_length == sum(Path(shard).stat().st_size for shard in shards)
    with moepack.open(packs[model]) as pack:
        tensor_length = pack.shape.expert_length + (pack.shape.dense_length or 0)
    assert with_source.gguf_py_length == tensor_length < with_source.compared_length
    assert "compared with gguf-py" in verification_text.report(with_source)
    files = packs[model].glob("*.bin")
    data_length = sum(file.stat().st_size for file in files if file.name != "index.bin")
    assert with_source.read_length == with_source.data_length == data_length


def test_a_pack_of_experts_alone_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    pack_model([first_shard("mixtral")], tmp_path / "pack", experts_only=True)
    report = verify(tmp_path / "pack", first_shard("mixtral"))
    assert report.passed
    with moepack.open(tmp_path / "pack") as pack:
        assert report.compared_length == pack.shape.expert_length


def replaced(model: Experts, layer: int, **fields: Any) -> Experts:
    families = [*model.families]
    families[layer] = dataclasses.replace(families[layer], **fields)
    return dataclasses.replace(model, families=tuple(families))


def other_type(model: Experts) -> Experts:
    first, *others = model.families[0].parts
    return replaced(model, 0, parts=(dataclasses.replace(first, type_id=13), *others))


def swapped_projections(model: Experts) -> Experts:
    down, gate, up = model.families[0].parts
    assert gate.length == up.length
    swapped = (
        dataclasses.replace(gate, places=up.places),
        dataclasses.replace(up, places=gate.places),
    )
    return replaced(model, 0, parts=(down, *swapped))


def swapped_experts(model: Experts) -> Experts:
    down, *others = model.families[1].parts
    places = [down.at(expert) for expert in range(16)]
    places[3], places[11] = places[11], places[3]
    down = dataclasses.replace(down, places=tuple(places), stride=0)
    return replaced(model, 1, parts=(down, *others))


def packed_wrongly(change: Callable[[Experts], Experts], folder: Path) -> tuple[Path, list[str]]:
    """Pack qwen3moe with a packer that got its experts wrong; return it and the true shards."""
    source = open_source([first_shard("qwen3moe")])
    model = experts.find_experts(source)
    planned = plan.make(change(model), layout.load("layers"), dense=find_dense(source, model))
    shards = tuple(map(describe_shard, source.shards))
    described = describe_source(source, experts.shape_of(source, model), shards)
    target = open_target(folder / "broken", is_alone=True)
    packer.pack(
        PlannedPack(source, described, planned),
        target,
        resume=False,
        strong=False,
        threads=1,
        progress=None,
    )
    return folder / "broken", [shard.path for shard in source.shards]


@pytest.mark.parametrize(
    ("change", "kinds", "layer", "kinds_alone"),
    [
        (swapped_projections, {"origin", "bytes"}, 0, set()),
        (swapped_experts, {"origin", "bytes"}, 1, set()),
        (lambda m: dataclasses.replace(m, families=m.families[:1]), {"missing"}, 1, set()),
        (lambda m: replaced(m, 0, parts=m.families[0].parts[:2]), {"missing"}, 0, set()),
        (lambda m: replaced(m, 0, expert_count=15), {"shape"}, 0, set()),
        (other_type, {"record", "shape"}, 0, {"record"}),
    ],
)
def test_a_packers_mistake_is_found(
    change: Callable[[Experts], Experts],
    kinds: set[str],
    layer: int,
    kinds_alone: set[str],
    tmp_path: Path,
) -> None:
    """The digests of such a pack are all right: only the verifier's own reading helps."""
    broken, shards = packed_wrongly(change, tmp_path)
    assert {finding.kind for finding in verify(broken).findings} == kinds_alone
    report = verify(broken, shards)
    assert {finding.kind for finding in report.findings} == kinds
    assert layer in {finding.layer for finding in report.findings}
    assert "a mistake of the program that wrote it" in (report.headline or "")


def test_families_of_one_layer_are_compared_each_with_its_own(tmp_path: Path) -> None:
    path = families_model(tmp_path)
    pack_model([path], tmp_path / "pack")
    assert verify(tmp_path / "pack", path).passed


def test_what_was_left_out_on_purpose_is_not_missing(tmp_path: Path) -> None:
    path = moe().write(tmp_path / "m.gguf")
    pack_model([path], tmp_path / "pack", layers=[0, 2])
    report = verify(tmp_path / "pack", [str(path)])
    assert report.passed
    assert report.layers == (0, 2)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("change", ["cut", "grown", "missing"])
def test_a_data_file_of_another_length_is_found(pack_copy: Path, change: str) -> None:
    path = pack_copy / "experts-00001.bin"
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-5] if change == "cut" else data + bytes(4096))
    report = verify(pack_copy)
    (finding,) = report.findings
    assert (finding.kind, finding.file) == ("file", path.name)
    assert report.checked_blob_count == {"cut": 31, "grown": 32, "missing": 16}[change]
    assert ("1 of 16 blobs and tensors in it are cut" in finding.message) == (change == "cut")


def test_what_is_left_of_a_file_that_was_cut_is_read(pack_copy: Path) -> None:
    """Up to the last byte of a part, in the midst of a blob."""
    with moepack.open(pack_copy) as pack:
        part = max(
            (pack.locate(1, expert, "up") for expert in range(16)), key=lambda one: one.offset
        )
    end = part.offset + part.length
    os.truncate(part.path, end)
    flip(part.path, end - 1)
    cut, damaged = verify(pack_copy).findings
    assert (cut.kind, cut.offset) == ("file", end)
    assert (damaged.kind, damaged.part, damaged.offset) == (
        "digest",
        "ffn_up_exps.weight",
        part.offset,
    )


def test_of_a_file_that_ends_between_two_blobs_the_later_one_is_lost(pack_copy: Path) -> None:
    with moepack.open(pack_copy) as pack:
        last = max((pack.locate(1, expert) for expert in range(16)), key=lambda one: one.offset)
    os.truncate(last.path, last.offset)
    report = verify(pack_copy)
    (finding,) = report.findings
    assert (finding.kind, finding.offset, report.checked_blob_count) == ("file", last.offset, 31)
    assert "1 of 16 blobs and tensors in it are cut or missing" in finding.message


def test_no_file_stays_open(small: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert verify(small / "pack", small / "model", threads=1).passed
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_shard_that_becomes_shorter_while_it_is_read_is_an_error(
    small: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(small / "model", tmp_path / "model"))
    *_, last = sorted(model.iterdir())

    def progress(_length: int, _total: int) -> None:
        os.truncate(last, 100)

    with pytest.raises(SourceError, match="became shorter") as caught:
        verify(small / "pack", model, threads=1, progress=progress)
    assert caught.value.path == str(last)


def test_a_data_file_that_becomes_shorter_while_it_is_read_is_a_finding(
    small: Path, tmp_path: Path
) -> None:
    pack = Path(shutil.copytree(small / "pack", tmp_path / "pack"))

    def progress(_length: int, _total: int) -> None:
        os.truncate(pack / "dense.bin", 100)

    (finding,) = verify(pack, threads=1, progress=progress).findings
    assert (finding.kind, finding.file) == ("file", "dense.bin")
    assert finding.message == "it became shorter while it was read"


def test_a_drive_may_give_back_less_than_is_read_at_once(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: whole(file, [into[0][:99]], at))
    report = verify(small / "pack", small / "model")
    assert report.passed
    assert report.read_length == report.data_length


def test_a_manifest_that_cannot_be_read_is_a_finding(pack_copy: Path, cli: Run) -> None:
    (pack_copy / "manifest.json").write_text("{")
    (finding,) = verify(pack_copy).findings
    assert (finding.kind, finding.file) == ("manifest", "manifest.json")
    assert finding.message.startswith("not JSON")
    run = cli("verify", pack_copy, "--json")
    assert run.returncode == 5
    assert '"kind": "manifest"' in run.stdout
    (pack_copy / "manifest.json").write_text('{"format": "moepack", "format_version": 2}')
    with pytest.raises(PackError, match="unknown format version"):
        verify(pack_copy)


def test_the_source_may_be_a_shard_a_folder_or_all_shards_in_any_order(tmp_path: Path) -> None:
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


def test_an_index_of_a_later_version_is_an_error_unless_it_is_damaged(pack_copy: Path) -> None:
    draft = Draft(pack_copy)
    draft.set("header", format_version=2)
    draft.save()
    with pytest.raises(PackError, match="unknown format version"):
        verify(pack_copy)
    draft.set("header", format_version=3)
    (pack_copy / "index.bin").write_bytes(draft.index)
    assert {finding.kind for finding in verify(pack_copy).findings} == {"index"}
    described = (pack_copy / "manifest.json").read_bytes()
    draft.save()
    (pack_copy / "manifest.json").write_bytes(described)
    assert {finding.kind for finding in verify(pack_copy).findings} == {"index"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model with padding everywhere, some not zero, and pack it into `pack`."""
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
        monkeypatch.setattr(checked_pack, "RUN_LENGTH", 100)


def flips(path: Path, offsets: Iterable[int], random: Random) -> Iterator[int]:
    """Yield each offset while one bit of its byte is flipped."""
    for offset in offsets:
        mask = 1 << random.randrange(8)
        flip(path, offset, mask)
        yield offset
        flip(path, offset, mask)


@pytest.mark.long
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("count", amounts(4, 400))
def test_every_flipped_bit_of_a_pack_is_found(small: Path, tmp_path: Path, count: int) -> None:
    """Of parts, tensors, headers and padding, of the index and of the manifest."""
    pack = Path(shutil.copytree(small / "pack", tmp_path / "pack"))
    assert verify(pack).passed
    random = Random(1)
    for path in sorted(pack.iterdir()):
        length = path.stat().st_size
        offsets = {0, length - 1, *random.sample(range(length), min(count, length))}
        if path.name == "dense.bin":
            offsets |= {start + step for start in range(0, length, 4096) for step in (0, 1, 20)}
        for offset in flips(path, offsets, random):
            try:
                report = verify(pack, threads=1)
            except PackError:
                assert path.name == "manifest.json"
                continue
            assert report.findings, (path.name, offset)
            assert report.passed is False
            if path.name not in ("index.bin", "manifest.json"):
                assert report.findings[0].file == path.name
                assert report.headline == f"a damaged file: {path.name}"
    assert verify(pack).passed


@pytest.mark.long
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("count", amounts(4, 500))
def test_every_flipped_bit_of_the_source_is_found(small: Path, tmp_path: Path, count: int) -> None:
    """Of expert tensors, dense tensors, headers, and padding, whether it was zero or not."""
    model = Path(shutil.copytree(small / "model", tmp_path / "model"))
    random = Random(2)
    starts = [shard.data_offset for shard in open_source(model).shards]
    for path, start in zip(sorted(model.iterdir()), starts, strict=True):
        length = path.stat().st_size
        offsets = random.sample(range(length), min(count, length))
        for offset in flips(path, {start - 1, start, length - 1, *offsets}, random):
            # A header may say nonsense.
            with contextlib.suppress(SourceError) if offset < start else contextlib.nullcontext():
                assert verify(small / "pack", model, threads=1).findings, (path.name, offset)
    assert verify(small / "pack", model).passed


def test_a_dense_tensor_and_a_header_that_differ_are_named(small: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small / "model", tmp_path / "model"))
    source = open_source(model)
    shard, tensor = next(one for one in source.tensors() if one[1].name.endswith("norm.bias"))
    flip(Path(source.shards[shard].path), tensor.offset + 5)
    (finding,) = verify(small / "pack", model).findings
    assert (finding.kind, finding.tensor, finding.file) == ("bytes", tensor.name, "dense.bin")
    assert finding.message.startswith("byte 5 of it is ")
    with moepack.open(small / "pack") as pack:
        assert finding.offset == pack.locate_dense(tensor.name).offset + 5


@pytest.mark.usefixtures("pieces")
def test_much_damage_in_one_place_is_one_finding(small: Path, tmp_path: Path) -> None:
    """Padding that is not zero, and a tensor that both readings of the source have otherwise."""
    pack = Path(shutil.copytree(small / "pack", tmp_path / "pack"))
    model = Path(shutil.copytree(small / "model", tmp_path / "model"))
    with moepack.open(pack) as opened:
        where = opened.locate(0, 0, "up")
        family = opened.index.families[0]
        kind = next(one for one in family.part_kinds if one.name == "ffn_up_exps.weight")
        shard, offset = opened.index.origin(family, kind, 0)
        blob = opened.locate(0, 0)
    for at in (3, 50):
        flip(model / opened.manifest.source.shards[shard].name, offset + at)
    report = verify(pack, model, with_gguf_py=True)
    assert [one.kind for one in report.findings] == ["bytes", "gguf-py"]
    assert {one.offset for one in report.findings} == {where.offset + 3}
    assert (report.headline or "").startswith("the source has other bytes, though the pack's")
    for at in (1, 100, 200):
        flip(blob.path, blob.offset + blob.length - at)
    (finding,) = verify(pack).findings
    assert (finding.kind, finding.offset) == ("padding", blob.offset + blob.length - 200)


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


def test_padding_of_shards_under_an_index_is_zero(small: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small / "model", tmp_path / "model"))
    index_model(model, tmp_path / "lain", digests=True)
    shard = open_source(model).shards[1]
    end = shard.tensors[1].offset + shard.tensors[1].length
    flip(Path(shard.path), end + 2)
    (finding,) = verify(tmp_path / "lain").findings
    assert (finding.kind, finding.offset) == ("padding", end + 2)


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


@pytest.mark.parametrize("last", [b"\0", b"x"])
def test_a_shard_without_the_padding_at_its_end_is_another_source(
    last: bytes, tmp_path: Path
) -> None:
    path = moe((0,), 2, ne=(4, 2), type_id=F32, block=(1, 4)).write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-1] + last)
    pack_model([path], tmp_path / "pack")
    length = path.stat().st_size
    os.truncate(path, length - 1)
    findings = verify(tmp_path / "pack", path).findings
    message = f"it is {length - 1:,} bytes long, it was {length:,}"
    assert ("source", message) in {(finding.kind, finding.message) for finding in findings}
