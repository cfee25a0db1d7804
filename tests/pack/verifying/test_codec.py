"""Verifying packs with parts stored by zstd: frames and their content."""

import shutil
import tracemalloc
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MoepackError
from moepack.pack.verifying.report import Report
from moepack.packing.pack_model import pack_model
from moepack.storage import frames
from tests.support.compressible import compressible, part_number, store, with_biases, write_model
from tests.support.models import flip
from tests.support.pack_draft import Draft, second_places

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


def test_a_damaged_frame_is_found_by_its_own_digest_and_by_what_it_is_decoded_to(
    pack: Path, packed: Path
) -> None:
    with moepack.open(pack) as opened:
        where = opened.locate(1, 2, DOWN)
    flip(where.path, where.offset + where.stored_length // 2)
    report = moepack.verify(pack)
    pairs = kinds(report)
    assert ("stored", DOWN) in pairs
    assert set(pairs) - {("stored", DOWN)} <= {("digest", DOWN), ("codec", DOWN)}
    assert len(pairs) == 2
    first = next(finding for finding in report.findings if finding.kind == "stored")
    assert first.place == f"layer 1 expert 2 {DOWN} in {where.path.name} at byte {where.offset:,}"
    assert report.headline == f"a damaged file: {where.path.name}"


@pytest.mark.parametrize("stored", [bytes(4000), b"\x28\xb5\x2f\xfd\x20"])
def test_what_cannot_be_decoded_and_is_as_it_was_written_is_a_mistake_of_the_writer(
    stored: bytes, pack: Path
) -> None:
    store(pack, part_number(pack, 0, 1, GATE), stored)
    report = moepack.verify(pack)
    assert kinds(report) == [("codec", GATE)]
    assert "mistake of the program that wrote it" in (report.headline or "")


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
    """The content must still be as long as the part."""
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
    length, block = 1 << 41, (128 << 10) << 3 | 0b010
    head = b"\xc0\x68" if has_window else b"\xe0"
    frame = b"\x28\xb5\x2f\xfd" + head + length.to_bytes(8, "little")
    frame += (block.to_bytes(3, "little") + b"x") * 300 + (block | 1).to_bytes(3, "little") + b"x"
    pack = tmp_path / "pack"
    pack_model(write_model(tmp_path / "m", compressible((0,), experts=2)), pack, codec="zstd")
    draft = Draft(pack)
    draft.set("part_kind", 0, length=length, ne0=1 << 20, ne1=1 << 19)
    draft.save()
    store(pack, part_number(pack, 0, 0, GATE), frame)
    with moepack.open(pack) as opened, opened.reader() as reader:
        with pytest.raises(MoepackError):
            reader.read(0, 0, GATE)
        with pytest.raises(MoepackError):
            reader.read(0, 0)
    tracemalloc.start()
    pairs = kinds(moepack.verify(pack, threads=1))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ("codec", GATE) in pairs
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
    draft = Draft(pack)
    second_places(draft)
    draft.body["index"].pop("sha256")
    draft.save()
    if not is_right:
        flip(pack / "second.bin", 100)
    name = draft.get("part_kind").name.rstrip(b"\0").decode()
    assert kinds(moepack.verify(pack)) == ([] if is_right else [("digest", name)])
