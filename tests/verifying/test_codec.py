"""Packs with parts stored by zstd are proven: frames, what they are decoded to, and the rest."""

import shutil
import tracemalloc
from pathlib import Path

import pytest

import moepack
from moepack.errors import MoepackError
from moepack.packing.pack_model import pack_model
from moepack.storage import frames
from moepack.verifying.report import Report
from tests.support.compressible import compressible, part_number, store, with_biases, write_model
from tests.support.models import flip, keys_of
from tests.support.pack_draft import Draft, Piece

GATE, UP, DOWN = (f"ffn_{name}_exps.weight" for name in ("gate", "up", "down"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "shards", with_biases(compressible()))


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("coded") / "pack"
    pack_model(model, path, codec="zstd", strong=True)
    return path


@pytest.fixture
def pack(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "pack"))


def part(pack: Path, layer: int, expert: int, name: str) -> bytes:
    with moepack.open(pack) as opened, opened.reader() as reader:
        return bytes(reader.read(layer, expert, name))


def kinds(report: Report) -> list[tuple[str, str | None]]:
    """Return kind and part of each finding."""
    return [(finding.kind, finding.part) for finding in report.findings]


def test_a_sound_pack_is_proven_with_and_without_its_source(packed: Path, model: Path) -> None:
    alone, compared = moepack.verify(packed), moepack.verify(packed, model)
    assert alone.passed
    assert compared.passed
    assert alone.read_length == alone.data_length
    assert compared.compared_length == sum(path.stat().st_size for path in model.parent.iterdir())
    sampled = moepack.verify(packed, model, layers="1", sample=0.5)
    assert sampled.passed is None
    assert 0 < sampled.checked_blob_count < 4


def test_each_flipped_byte_of_a_pack_is_found(tmp_path: Path) -> None:
    builder = compressible(
        (0,), experts=2, ne=(8, 4), masks=dict.fromkeys(("gate", "up", "down"), 3)
    )
    pack = tmp_path / "pack"
    pack_model(write_model(tmp_path / "m", builder), pack, codec="zstd", alignment=8)
    with moepack.open(pack) as opened:
        codecs = {opened.locate(*key, name).codec for key in keys_of(opened) for name in (GATE, UP)}
    assert codecs == {"zstd"}
    assert moepack.verify(pack, threads=1).passed
    experts = pack / "experts-00000.bin"
    for path, step in ((experts, 1), (pack / "dense.bin", 61), (pack / "index.bin", 41)):
        original = path.read_bytes()
        for at in range(0, len(original), step):
            flip(path, at, 1 << at % 8)
            report = moepack.verify(pack, threads=1)
            assert report.findings, (path.name, at)
            assert path is not experts or {f.file for f in report.findings} == {path.name}
            path.write_bytes(original)


def test_a_damaged_frame_is_found_by_its_own_digest_and_by_what_it_is_decoded_to(
    pack: Path, packed: Path
) -> None:
    with moepack.open(pack) as opened:
        where = opened.locate(1, 2, DOWN)
    flip(where.path, where.offset + where.stored_length // 2)
    report = moepack.verify(pack)
    found = kinds(report)
    assert ("stored", DOWN) in found
    assert set(found) - {("stored", DOWN)} <= {("digest", DOWN), ("codec", DOWN)}
    assert len(found) == 2
    first = next(finding for finding in report.findings if finding.kind == "stored")
    assert first.place == f"layer 1 expert 2 {DOWN} in {where.path.name} at byte {where.offset:,}"
    assert report.headline == f"a damaged file: {where.path.name}"


def test_what_a_source_has_other_bytes_for_is_found(pack: Path, model: Path) -> None:
    """The pack is right by itself; a byte of the source is not what was packed."""
    other = Path(shutil.copytree(model.parent, pack.parent / "other"))
    with moepack.open(pack) as opened:
        family = opened.index.families[0]
        number = [kind.name for kind in family.part_kinds].index(DOWN)
        shard, offset = opened.index.origin(family, family.part_kinds[number], 3)
        where = opened.locate(0, 3, DOWN)
    flip(sorted(other.iterdir())[shard], offset + 77)
    report = moepack.verify(pack, other)
    (finding,) = report.findings
    assert (finding.kind, finding.layer, finding.expert, finding.part) == ("bytes", 0, 3, DOWN)
    assert (finding.file, finding.offset) == (where.path.name, where.offset)
    assert "byte 77 of it" in finding.message


def test_a_digest_of_stored_bytes_that_is_wrong_is_a_finding_of_its_own(pack: Path) -> None:
    data = part(pack, 0, 1, GATE)
    other = frames.compress(data, 9)
    store(pack, part_number(pack, 0, 1, GATE), other, stated=b"something else")
    assert part(pack, 0, 1, GATE) == data
    assert kinds(moepack.verify(pack)) == [("stored", GATE)]
    store(pack, part_number(pack, 0, 1, GATE), other)
    assert moepack.verify(pack).passed


@pytest.mark.parametrize("stored", [bytes(4000), b"\x28\xb5\x2f\xfd\x20"])
def test_what_cannot_be_decoded_and_is_as_it_was_written_is_a_mistake_of_the_writer(
    stored: bytes, pack: Path
) -> None:
    store(pack, part_number(pack, 0, 1, GATE), stored)
    report = moepack.verify(pack)
    assert kinds(report) == [("codec", GATE)]
    assert "mistake of the program that wrote it" in (report.headline or "")


def test_trailing_bytes_and_frames_of_other_lengths_are_findings(pack: Path) -> None:
    data = part(pack, 0, 1, GATE)
    number = part_number(pack, 0, 1, GATE)
    for frame in (
        frames.compress(data, 3) + b"\1",
        frames.compress(data, 3)[:-1],
        frames.compress(data[:-1], 3),
        frames.compress(data + b"x", 3),
        frames.compress(data[:8000], 3) + frames.compress(data[8000:], 3),
    ):
        store(pack, number, frame)
        assert kinds(moepack.verify(pack)) == [("codec", GATE)]


def test_a_frame_of_other_bytes_is_found_by_the_digest_of_the_part(pack: Path) -> None:
    store(pack, part_number(pack, 0, 1, GATE), frames.compress(part(pack, 0, 2, GATE), 3))
    assert kinds(moepack.verify(pack)) == [("digest", GATE)]


def test_the_stored_digest_of_a_part_that_is_stored_as_it_is_is_its_digest(pack: Path) -> None:
    number = part_number(pack, 1, 0, UP)
    draft = Draft(pack)
    section = draft.sections["stored_digests"]
    at = section.offset + number * section.record_length
    draft.index[at] ^= 1
    draft.body["index"].pop("sha256")
    draft.save()
    report = moepack.verify(pack)
    assert kinds(report) == [("record", UP)]
    assert "though it is stored as it is" in report.findings[0].message
    assert part(pack, 1, 0, UP)


def test_the_digests_of_a_file_with_frames_may_be_unknown(pack: Path) -> None:
    """What is decoded still has to be as long as the part."""
    data = part(pack, 0, 1, GATE)
    draft = Draft(pack)
    draft.set("file", 0, flags=1)
    stored = draft.sections["stored_digests"]
    for number in range(draft.sections["parts"].record_count):
        if draft.get("part", number).file == 0:
            draft.set("part", number, digest=0)
            at = stored.offset + number * stored.record_length
            draft.index[at : at + 8] = bytes(8)
    draft.body["index"].pop("sha256")
    draft.save()
    assert moepack.verify(pack).passed
    assert part(pack, 0, 1, GATE) == data
    with moepack.open(pack) as opened:
        where = opened.locate(0, 1, GATE)
    flip(where.path, where.offset)
    assert kinds(moepack.verify(pack)) == [("codec", GATE)]


@pytest.mark.parametrize("has_window", [True, False])
def test_a_frame_that_states_two_tebibytes_takes_neither_time_nor_memory(
    has_window: bool, tmp_path: Path
) -> None:
    stated, block = 1 << 41, (128 << 10) << 3 | 0b010
    head = b"\xc0\x68" if has_window else b"\xe0"
    frame = b"\x28\xb5\x2f\xfd" + head + stated.to_bytes(8, "little")
    frame += (block.to_bytes(3, "little") + b"x") * 300 + (block | 1).to_bytes(3, "little") + b"x"
    pack = tmp_path / "pack"
    pack_model(write_model(tmp_path / "m", compressible((0,), experts=2)), pack, codec="zstd")
    draft = Draft(pack)
    draft.set("part_kind", 0, length=stated, ne0=1 << 20, ne1=1 << 19)
    draft.save()
    store(pack, part_number(pack, 0, 0, GATE), frame)
    with moepack.open(pack) as opened, opened.reader() as reader:
        with pytest.raises(MoepackError):
            reader.read(0, 0, GATE)
        with pytest.raises(MoepackError):
            reader.read(0, 0)
    tracemalloc.start()
    found = kinds(moepack.verify(pack, threads=1))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ("codec", GATE) in found
    assert most < 32 << 20


def test_a_strong_digest_is_of_what_is_decoded(pack: Path) -> None:
    number = part_number(pack, 1, 0, GATE)
    draft = Draft(pack)
    section = draft.sections["strong_digests"]
    draft.index[section.offset + number * section.record_length] ^= 1
    draft.body["index"].pop("sha256")
    draft.save()
    report = moepack.verify(pack)
    assert kinds(report) == [("digest", GATE)]
    assert "SHA-256" in report.findings[0].message


@pytest.mark.parametrize("is_right", [True, False])
def test_a_second_place_has_the_same_frame(is_right: bool, pack: Path) -> None:
    number = part_number(pack, 0, 1, GATE)
    with moepack.open(pack) as opened:
        where = opened.locate(0, 1, GATE)
    with open(where.path, "rb") as file:
        file.seek(where.offset)
        frame = bytearray(file.read(where.stored_length))
    if not is_right:
        frame[100] ^= 1
    add_second_place(pack, number, bytes(frame))
    found = kinds(moepack.verify(pack))
    assert found == ([] if is_right else [("digest", GATE)])


def add_second_place(pack: Path, number: int, stored: bytes) -> None:
    """Add a file of second places, and the second place of a part in it."""
    draft = Draft(pack)
    length = -(-len(stored) // 4096) * 4096
    (pack / "second.bin").write_bytes(stored.ljust(length, b"\0"))
    pieces = {piece.name.rstrip(b"\0"): piece for piece in draft.pieces()}
    pieces.pop(b"strong_digests")
    files = pieces[b"files"]
    record = b"second.bin".ljust(256, b"\0") + length.to_bytes(8, "little") + bytes([2, *[0] * 7])
    pieces[b"files"] = files._replace(data=files.data + record)
    count = len(pieces[b"parts"].data) // 32
    places = bytearray(16 * count)
    file_number = len(pieces[b"files"].data) // 272
    places[16 * number : 16 * number + 8] = file_number.to_bytes(8, "little")
    draft.rebuild([*pieces.values(), Piece(b"second_places", bytes(places), 16, 0)])
    draft.body["files"].append({"name": "second.bin", "length": length})
    draft.body["index"].pop("sha256")
    draft.save()
