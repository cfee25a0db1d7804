"""Packs with parts stored by zstd: the parts, the same bytes each time, no lost file."""

import json
import os
import re
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard

import moepack
from moepack.common.errors import MachineError, PackError, RequestError
from moepack.pack.format import manifest
from moepack.pack.mounting import mount as mounting
from moepack.packing.pack_model import pack_model
from moepack.packing.plan import layout
from moepack.packing.plan.pack_summary import PackSummary
from moepack.packing.writing import compressed_files
from moepack.packing.writing.line_log import LineLog
from moepack.storage import frames
from tests.support.compressible import LONG, SHORT, compressible, with_biases, write_model
from tests.support.gguf_builder import TensorSpec
from tests.support.interruptions import StopHereError
from tests.support.models import REAL_MODELS, contents, first_shard, flip, keys_of, tree

pytestmark = pytest.mark.long

JOURNAL = "pack.journal"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of three layers with gate and down that zstd shortens, and small parts."""
    builder = with_biases(compressible((0, 1, 2)))
    return write_model(tmp_path_factory.mktemp("model") / "shards", builder)


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "pack"
    pack_model(model, path)
    return path


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "pack"
    pack_model(model, path, codec="zstd")
    return path


def parts_of(path: Path) -> dict[tuple[int, int, str], tuple[str | None, bytes, bytes]]:
    """Map each part to its codec, its bytes on disk, and its bytes as they are read."""
    with moepack.open(path) as pack, pack.reader() as reader:
        parts = {}
        for layer, expert in keys_of(pack):
            for kind in pack.parts(layer):
                where = pack.locate(layer, expert, kind.name)
                with open(where.path, "rb") as file:
                    file.seek(where.offset)
                    stored = file.read(where.stored_length)
                data = bytes(reader.read(layer, expert, kind.name))
                parts[layer, expert, kind.name] = (where.codec, stored, data)
        return parts


# What is compressed


def test_parts_are_frames_or_as_they_were_with_both_digests_in_the_index(
    packed: Path, plain: Path
) -> None:
    with moepack.open(packed) as pack:
        index = pack.index
        assert index.codecs == ("zstd",)
        assert index.directory["codecs"].is_required
        assert not index.directory["stored_digests"].is_required
        numbers = {}
        for family in index.families:
            for expert in range(family.expert_count):
                for number, kind in enumerate(family.part_kinds):
                    first = family.first_part + expert * len(family.part_kinds)
                    numbers[family.layer, expert, kind.name] = first + number, kind
        coded = {True: 0, False: 0}
        plain_parts = parts_of(plain)
        for key, (codec, stored, data) in parts_of(packed).items():
            number, kind = numbers[key]
            assert data == plain_parts[key][2]
            assert index.part(number, kind)[2] == xxhash.xxh3_64_intdigest(data)
            assert index.stored_digest(number) == xxhash.xxh3_64_intdigest(stored)
            assert bool(index.part(number, kind)[4]) == (codec is not None)
            coded[codec is not None] += 1
            if codec is None:
                assert stored == data
                assert "up" in key[2]
                continue
            assert "up" not in key[2] or "bias" in key[2]
            assert len(stored) <= 0.95 * len(data)
            assert zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False) == data
            parameters = zstandard.get_frame_parameters(stored)
            assert (parameters.content_size, parameters.dict_id) == (len(data), 0)
            assert not parameters.has_checksum
    assert coded == {True: 24 + 12, False: 12}
    assert (packed / "dense.bin").read_bytes() == (plain / "dense.bin").read_bytes()


@pytest.mark.parametrize("model_name", REAL_MODELS)
def test_a_pack_in_which_nothing_is_shortened_is_what_it_would_be_without_a_codec(
    model_name: str, tmp_path: Path
) -> None:
    summary = pack_model(first_shard(model_name), tmp_path / "coded", codec="zstd:19")
    pack_model(first_shard(model_name), tmp_path / "plain")
    assert contents(tmp_path / "coded") == contents(tmp_path / "plain")
    assert summary.stored_length == summary.expert_length


def test_a_part_that_is_shortened_by_less_than_a_twentieth_stays_as_it_is(tmp_path: Path) -> None:
    """Frames of 95 % and of a byte more: by how many of a part's bytes are the same."""
    builder = compressible((0,), experts=2, ne=(128, 256), masks={"gate": LONG, "down": LONG})
    gate = next(spec for spec in builder.tensors if "gate" in spec.name)
    length = len(gate.data) // 2
    shares = {}
    for zeros in range(6400, 7000, 4):
        frame = frames.compress(bytes(zeros) + gate.data[zeros:length], 3)
        shares[len(frame)] = zeros
    most = max(stored for stored in shares if 20 * stored <= 19 * length)
    least = min(stored for stored in shares if 20 * stored > 19 * length)
    assert least - most < 20
    enough, too_little = shares[most], shares[least]
    gate.data = (
        bytes(enough)
        + gate.data[enough:length]
        + bytes(too_little)
        + gate.data[length + too_little :]
    )
    pack_model(write_model(tmp_path / "m", builder), tmp_path / "pack", codec="zstd:3")
    parts = parts_of(tmp_path / "pack")
    assert parts[0, 0, "ffn_gate_exps.weight"][0] == "zstd"
    assert len(parts[0, 0, "ffn_gate_exps.weight"][1]) == most
    assert parts[0, 1, "ffn_gate_exps.weight"][0] is None


def test_a_blob_whose_padding_takes_all_that_is_saved_stays_as_it_is(tmp_path: Path) -> None:
    """Its only part that is shortened is a bias, which shares a block with nothing."""
    masks = {"gate": LONG, "down": LONG}
    builder = compressible((0, 1), masks=masks)
    bias = TensorSpec("blk.0.ffn_up_exps.bias", (64, 4), 0, bytes(4 * 64 * 4))
    builder.tensors.append(bias)
    down = next(spec for spec in builder.tensors if spec.name == "blk.1.ffn_down_exps.weight")
    down.data = bytes(byte & SHORT for byte in down.data)
    pack_model(write_model(tmp_path / "m", builder), tmp_path / "pack", codec="zstd")
    codecs = {key: codec for key, (codec, _, _) in parts_of(tmp_path / "pack").items()}
    assert codecs[0, 0, "ffn_up_exps.bias"] is None
    assert codecs[1, 0, "ffn_down_exps.weight"] == "zstd"


# The same bytes


def own_layout(folder: Path, name: str, codec: str) -> Path:
    """Write a shipped layout with a codec; return its path."""
    text = (Path(layout.__file__).parents[3] / "layouts" / f"{name}.toml").read_text()
    path = folder / f"{name}.toml"
    path.write_text(text.replace("small_alignment = 64", f"small_alignment = 64\ncodec = {codec}"))
    return path


def test_a_layout_may_name_the_codec(model: Path, packed: Path, tmp_path: Path) -> None:
    own = own_layout(tmp_path, "layers", '"zstd"')
    pack_model(model, tmp_path / "pack", layout=own)
    assert contents(tmp_path / "pack") == contents(packed)
    described = manifest.decode((packed / manifest.NAME).read_bytes(), "manifest.json")
    assert described.layout["parts"]["codec"] == "zstd:3"
    pack_model(model, tmp_path / "other", layout=own, codec="zstd:9")
    assert contents(tmp_path / "other") != contents(packed)
    with pytest.raises(RequestError, match="parts.codec"):
        layout.load(own_layout(tmp_path, "layers", "3"))


def test_a_codec_is_refused_where_blobs_have_equal_distances(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"layout natural, codec zstd:3.*differ in length"):
        pack_model(model, tmp_path / "pack", layout="natural", codec="zstd")
    with pytest.raises(RequestError, match="natural.toml"):
        layout.load(own_layout(tmp_path, "natural", '"zstd"'))


@pytest.mark.parametrize("layout_name", ["layers", "hot-first"])
def test_restoring_and_exporting_give_what_a_plain_pack_gives(
    layout_name: str, model: Path, tmp_path: Path
) -> None:
    for name, codec in (("plain", None), ("coded", "zstd")):
        options: dict[str, Any] = {"layout": layout_name, "codec": codec, "strong": True}
        pack_model(model, tmp_path / name, sha256=True, **options)
        moepack.restore(tmp_path / name, tmp_path / f"{name} shards")
        moepack.export_gguf(tmp_path / name, tmp_path / f"{name}.gguf")
    assert tree(tmp_path / "coded shards") == tree(model.parent)
    assert (tmp_path / "coded.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()
    assert moepack.verify(tmp_path / "coded", model, sha256=True).sha256_count
    with moepack.open(tmp_path / "coded") as coded, moepack.open(tmp_path / "plain") as plain:
        strong = [
            [pack.index.strong_digest(number) for number in range(pack.index.part_count)]
            for pack in (coded, plain)
        ]
    assert strong[0] == strong[1]


def test_what_was_written_is_told_and_what_is_planned_is_an_upper_bound(
    model: Path, tmp_path: Path
) -> None:
    plans: list[PackSummary] = []
    done: list[tuple[int, int]] = []
    summary = pack_model(
        model, tmp_path / "pack", codec="zstd", planned=plans.append,
        progress=lambda length, total: done.append((length, total)),
    )  # fmt: skip
    (planned,) = plans
    assert planned.codec == summary.codec == "zstd:3"
    assert planned.stored_length is None
    on_disk = {path.name: path.stat().st_size for path in (tmp_path / "pack").iterdir()}
    assert {file.name: file.length for file in summary.files}.items() <= on_disk.items()
    assert summary.index_length == on_disk["index.bin"] <= planned.index_length
    assert summary.data_length == summary.written_length
    assert summary.data_length < planned.data_length
    assert sum(length for length, _ in done) == planned.data_length
    assert {total for _, total in done} == {planned.data_length}
    facts = moepack.inspect(tmp_path / "pack")
    assert facts.padding_length == summary.padding_length  # type: ignore[union-attr]
    payload = (summary.stored_length or 0) + summary.payload_length - summary.expert_length
    assert summary.padding_length == summary.data_length - payload


# What it does not go with


@pytest.mark.parametrize(
    "text", ["zstd:0", "zstd:20", "zstd:-1", "zstd:", "lz4", "", "zstd:3:4", "ZSTD", "zstd:\uff13"]
)
def test_other_codecs_and_levels_are_refused(text: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such codec.*zstd:1 to zstd:19"):
        pack_model(model, tmp_path / "pack", codec=text)
    assert not (tmp_path / "pack").exists()


def test_restoring_in_place_and_mounting_are_refused_and_nothing_is_touched(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = Path(shutil.copytree(packed, tmp_path / "pack"))
    before = tree(pack)
    with pytest.raises(RequestError, match="stored by a codec") as caught:
        moepack.restore(pack, tmp_path / "shards", in_place=True)
    assert "without `in_place`" in (caught.value.hint or "")
    assert tree(pack) == before
    assert not (tmp_path / "shards").exists()
    monkeypatch.setattr(mounting, "_fuse_server", lambda: None)
    (tmp_path / "mount").mkdir()
    with pytest.raises(RequestError, match="a mount cannot show them") as caught:
        moepack.mount(pack, tmp_path / "mount")
    assert "moepack restore" in (caught.value.hint or "")


def test_a_blob_that_is_not_raw_bytes_is_not_extracted_but_its_parts_are(
    packed: Path, plain: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    which = ("--layer", "1", "--expert", "2")
    outcome = cli("extract", packed, *which, "-o", tmp_path / "blob")
    assert outcome.returncode == 2
    assert "stored by a codec" in outcome.stderr
    assert "--part" in outcome.stderr
    for path in (packed, plain):
        target = tmp_path / path.parent.name
        cli("extract", path, *which, "--part", "gate", "-o", target)
    first, second = (tmp_path / path.parent.name for path in (packed, plain))
    assert first.read_bytes() == second.read_bytes() != b""


def test_the_command_says_what_was_saved_and_where_it_is_stored(
    model: Path, packed: Path, tmp_path: Path, cli: Callable[..., Any]
) -> None:
    made = cli("pack", model, "-o", tmp_path / "pack", "--codec", "zstd")
    assert contents(tmp_path / "pack") == contents(packed)
    assert "zstd:3, where it shortens a part by 5 %; files are at most that long" in made.stdout
    assert re.search(r"experts stored in [\d.]+ KiB by zstd:3, 3\d\.\d% less", made.stdout)
    nothing = cli("pack", first_shard("mixtral"), "-o", tmp_path / "other", "--codec", "zstd")
    assert "zstd:3 shortens no part enough: the pack is as without it" in nothing.stdout
    assert "zstd: stored in" in cli("inspect", packed).stdout
    located = cli("locate", packed, "--layer", "0", "--expert", "1").stdout
    assert "stored  by zstd: ffn_gate_exps.weight in 8," in located
    assert "codec" not in cli("inspect", tmp_path / "other").stdout


# Whatever interrupts it


def journaled(target: Path) -> list[str]:
    """Name the files that the journal in `target` says are finished."""
    names = []
    for line in (target / JOURNAL).read_bytes().splitlines()[1:]:
        entry = json.loads(line)
        if "name" in entry:
            names.append(entry["name"])
        else:
            names.remove(entry["forgotten"])
    return names


def interrupt(model: Path, target: Path, call: int) -> None:
    """Pack until progress is reported for the `call`-th time."""
    calls = iter(range(call))

    def progress(_length: int, _total: int) -> None:
        if next(calls, None) is None:
            raise StopHereError

    with pytest.raises(StopHereError):
        pack_model(model, target, codec="zstd", threads=1, progress=progress)


def resume(model: Path, target: Path, packed: Path) -> int:
    """Go on; the result is as if nothing had happened, and finished files were left alone.

    Returns how many were.
    """
    names = journaled(target) if (target / JOURNAL).exists() else []
    before = {name: (target / name).stat().st_mtime_ns for name in names}
    summary = pack_model(model, target, codec="zstd", resume=True)
    assert contents(target) == contents(packed)
    assert {name: (target / name).stat().st_mtime_ns for name in names} == before
    assert summary.resumed_file_count == len(names)
    assert summary.written_length == summary.data_length - sum(
        (target / name).stat().st_size for name in names
    )
    return len(names)


def test_interrupted_at_any_blob_it_leaves_no_pack_and_resumes(
    model: Path, packed: Path, tmp_path: Path
) -> None:
    resumed = []
    for call in (0, 2, 5, 9, 12):
        target = tmp_path / str(call)
        interrupt(model, target, call)
        with pytest.raises(PackError):
            moepack.open(target)
        target.mkdir(exist_ok=True)  # with nothing finished it is gone
        if call == 5:  # as a killed packer leaves it, which does not clean up
            (target / "experts-00002.bin").write_bytes(b"half")
        resumed.append(resume(model, target, packed))
    assert set(resumed) == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def interrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an interrupted pack of which two files of three are finished."""
    target = tmp_path_factory.mktemp("interrupted") / "pack"
    interrupt(model, target, 10)
    assert len(journaled(target)) == 2
    return target


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_an_entry_of_other_parts_is_not_trusted(
    model: Path, packed: Path, interrupted: Path, tmp_path: Path
) -> None:
    log = LineLog(interrupted / JOURNAL)
    first, entry = islice(log.trusted(), 2)
    log.close()
    lengths, digests = entry["stored_lengths"], entry["stored_digests"]
    others: list[dict[str, str]] = [
        {key: value for key, value in entry.items() if not key.startswith("stored")},
        {key: value for key, value in entry.items() if key != "stored_digests"},
        entry | {"stored_lengths": lengths[:-16]},
        entry | {"stored_digests": digests + "00" * 8},
        entry | {"stored_lengths": "00" * 8 + lengths[16:]},
        entry | {"stored_lengths": "ff" * 8 + lengths[16:]},
        entry | {"stored_lengths": "0000010000000000" + lengths[16:]},
        entry | {"stored_lengths": "x"},
        entry | {"digests": ""},
    ]
    for number, other in enumerate(others):
        target = Path(shutil.copytree(interrupted, tmp_path / str(number)))
        log = LineLog(target / JOURNAL)
        log.begin(first)
        log.append(other)
        log.close()
        before = identity(target / entry["name"])
        pack_model(model, target, codec="zstd", resume=True)
        assert contents(target) == contents(packed), number
        assert identity(target / entry["name"]) != before, number


def test_resuming_with_another_codec_or_version_of_it_is_refused(
    model: Path, interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path(shutil.copytree(interrupted, tmp_path / "pack"))
    for codec in (None, "zstd:9"):
        with pytest.raises(RequestError, match="other input: not the same layout"):
            pack_model(model, target, codec=codec, resume=True)
    monkeypatch.setattr(frames, "VERSION", "9.9.9")
    with pytest.raises(RequestError, match="not the same version of the codec"):
        pack_model(model, target, codec="zstd", resume=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_part_that_cannot_be_compressed_ends_it_and_it_resumes(
    threads: int, model: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(30))

    def fails_at_last(data: bytes, level: int) -> bytes:
        if next(calls, None) is None:
            raise MemoryError
        return frames.compress(data, level)

    with monkeypatch.context() as patch:
        patch.setattr(compressed_files, "compress", fails_at_last)
        with pytest.raises(MachineError, match="not enough memory"):
            pack_model(model, tmp_path / "pack", codec="zstd", threads=threads)
    assert journaled(tmp_path / "pack") == ["experts-00000.bin"]
    assert resume(model, tmp_path / "pack", packed) == 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_finished_file_that_is_touched_is_committed_if_its_stored_bytes_are_the_same(
    is_damaged: bool, model: Path, packed: Path, tmp_path: Path
) -> None:
    first = tmp_path / "pack" / "experts-00000.bin"

    def progress(_length: int, _total: int) -> None:
        if (tmp_path / "pack" / "experts-00002.bin").exists() and first.stat().st_nlink == 1:
            if is_damaged:
                flip(first, 5)
            os.link(first, tmp_path / "link")

    if is_damaged:
        with pytest.raises(MachineError, match="changed or removed after it was written"):
            pack_model(model, tmp_path / "pack", codec="zstd", progress=progress)
        resume(model, tmp_path / "pack", packed)
    else:
        pack_model(model, tmp_path / "pack", codec="zstd", progress=progress)
        assert contents(tmp_path / "pack") == contents(packed)
