"""An index over the shards themselves: the same bytes as the pack, whole or none, none copied."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, MoepackError, PackError, RequestError, SourceError
from moepack.pack.opening.open_model import open_model
from moepack.packing.pack_model import pack_model
from moepack.packing.shard_index import index_model
from moepack.source import gguf_header
from tests.support import odd_models
from tests.support.faulty_backend import NAMES, require
from tests.support.gguf_builder import F32, moe, split, write_shards
from tests.support.interruptions import StopHereError
from tests.support.models import (
    REAL_MODELS,
    contents,
    first_shard,
    flip,
    keys_of,
    shards_of,
)
from tests.support.reads import HeldFile

pytestmark = pytest.mark.long

LINK = "shard-00001-of-00001.gguf"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """Write a model of one shard into a folder of its own, and lay an index beside it."""
    (tmp_path / "models").mkdir()
    path = moe((0, 1), ne=(64, 33), type_id=F32, block=(1, 4)).write(tmp_path / "models" / "m.gguf")
    index_model(path, tmp_path / "models" / "m.index")
    return path


def every_part(path: Path, backend: str) -> dict[tuple[int, int, str], bytes]:
    """Read all parts of all experts, once alone and once with their blobs."""
    parts = {}
    with moepack.open(path) as pack, pack.reader(backend=backend, check="always") as reader:
        for expert in reader.read_many(keys_of(pack)):
            for kind in pack.parts(expert.layer):
                key = expert.layer, expert.expert, kind.name
                parts[key] = bytes(expert.part(kind.name))
                assert bytes(reader.read(*key)) == parts[key]
    return parts


@pytest.mark.parametrize(
    ("model", "digests"),
    [
        *((model, number % 2 == 0) for number, model in enumerate(REAL_MODELS)),
        *((model, number % 2 == 0) for number, model in enumerate(odd_models.MODELS)),
    ],
)
def test_every_backend_reads_what_the_pack_has(
    model: str, digests: bool, tmp_path: Path, packs: dict[str, Path]
) -> None:
    if model in REAL_MODELS:
        shards, pack = shards_of(model), packs[model]
    else:
        shards = [str(path) for path in odd_models.write(model, tmp_path / "source")]
        pack = tmp_path / "pack"
        pack_model(shards[0], pack)
    done = index_model(shards[0], tmp_path / "index", digests=digests)
    assert done.has_digests is digests
    expected = every_part(pack, "buffered")
    for name in NAMES:
        require(name, pack)
        assert every_part(tmp_path / "index", name) == expected
    names = {name for name in os.listdir(tmp_path / "index") if not name.startswith("shard-")}
    assert names == {"index.bin", "manifest.json"}
    with moepack.open(pack) as ours, moepack.open(tmp_path / "index") as theirs:
        for layer, expert in keys_of(ours):
            for kind in ours.parts(layer):
                digest = theirs.locate(layer, expert, kind.name).digest
                assert digest == (ours.locate(layer, expert, kind.name).digest if digests else None)


def test_shards_may_be_moved_together_with_the_index(one: Path, tmp_path: Path) -> None:
    expected = every_part(one.parent / "m.index", "buffered")
    one.parent.rename(tmp_path / "moved")
    assert every_part(tmp_path / "moved" / "m.index", "buffered") == expected
    assert not os.path.isabs(os.readlink(tmp_path / "moved" / "m.index" / LINK))
    shutil.copytree(tmp_path / "moved" / "m.index", tmp_path / "copy")  # follows the links
    (tmp_path / "moved" / "m.index").rename(tmp_path / "alone")
    with pytest.raises(PackError, match="the shard is missing") as raised:
        moepack.open(tmp_path / "alone")
    assert "moepack index" in str(raised.value.hint)
    shutil.rmtree(tmp_path / "moved")
    assert every_part(tmp_path / "copy", "buffered") == expected


def test_a_folder_that_is_a_link_gets_links_that_lead_to_the_shards(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "deep" / "real").mkdir(parents=True)
    (tmp_path / "a" / "index").symlink_to(tmp_path / "b" / "deep" / "real")
    path = moe((0,)).write(tmp_path / "a" / "m.gguf")
    index_model(path, tmp_path / "a" / "index")
    assert every_part(tmp_path / "a" / "index", "buffered")


def test_a_hub_cache_is_indexed_through_its_links(tmp_path: Path) -> None:
    cache = tmp_path / "models--me--m"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "rev").mkdir(parents=True)
    sha256s = []
    for number, path in enumerate(shards_of("mixtral")):
        sha256s.append(f"{number:064x}")
        shutil.copy(path, cache / "blobs" / sha256s[-1])
        link = cache / "snapshots" / "rev" / Path(path).name
        link.symlink_to(Path("../../blobs") / sha256s[-1])
    shard = cache / "snapshots" / "rev" / first_shard("mixtral").name
    index_model(shard, tmp_path / "index")
    index_model(first_shard("mixtral"), tmp_path / "plain")
    expected = every_part(tmp_path / "plain", "buffered")
    assert every_part(tmp_path / "index", "buffered") == expected
    with moepack.open(tmp_path / "index") as pack:
        entries = pack.manifest.source.shards
    assert [entry.sha256 for entry in entries] == sha256s
    assert [entry.name for entry in entries] == [Path(path).name for path in shards_of("mixtral")]


def test_another_model_in_place_of_a_shard_is_seen_at_opening(one: Path) -> None:
    expected = every_part(one.parent / "m.index", "buffered")
    whole = one.read_bytes()
    other = (
        moe((0, 1), ne=(64, 33), type_id=F32, block=(1, 4))
        .put("general.name", "str", "Built for a text")
        .bytes()
    )
    assert len(other) == len(whole)
    for data, problem in (
        (other, "the shard's header is not what it was"),
        (whole[:-100], "the shard is not as long as it was"),
        (whole + bytes(32), "the shard is not as long as it was"),
        (b"", "the shard is not as long as it was"),
    ):
        one.write_bytes(data)
        with pytest.raises(PackError, match=problem) as raised:
            moepack.open(one.parent / "m.index")
        assert raised.value.path == str(one.parent / "m.index" / LINK)
    one.write_bytes(whole)
    os.utime(one, (1, 1))
    assert every_part(one.parent / "m.index", "buffered") == expected


@pytest.mark.parametrize("use", ["opened", "parsed"])
def test_a_header_that_comes_in_short_reads_is_the_same(one: Path, use: str) -> None:
    """As file systems in user space may give it: 100 bytes at a time."""
    whole, link = one.read_bytes(), one.parent / "m.index" / LINK
    try:
        held = HeldFile(lambda at, length: whole[at : at + min(length, 100)], len(whole))
    except OSError as error:
        pytest.skip(f"this user may not mount FUSE: {error.strerror}")
    with held:
        held.let_go()
        if use == "opened":
            link.unlink()
            link.symlink_to(held.path)
            moepack.open(one.parent / "m.index").close()
        else:
            assert gguf_header.read(held.path).tensors == gguf_header.read(one).tensors


def test_what_no_record_covers_is_restored_as_it_stands(tmp_path: Path) -> None:
    """Though it should be zeros: the shard is restored, or nothing."""
    shard = moe((0,), 2, ne=(4, 2), type_id=F32, block=(1, 4)).write(tmp_path / "m.gguf")
    index_model(shard, tmp_path / "index")
    with moepack.open(tmp_path / "index") as pack:
        ends = sorted(tensor.shard_offset + tensor.length for tensor in pack.index.tensors())
    assert ends[-1] < shard.stat().st_size
    for at in (ends[0], ends[1], shard.stat().st_size - 1):
        flip(shard, at)
        moepack.restore(tmp_path / "index", tmp_path / "restored", force=True)
        assert (tmp_path / "restored" / "m.gguf").read_bytes() == shard.read_bytes()


def test_a_part_lies_in_no_blob(one: Path) -> None:
    with moepack.open(one.parent / "m.index") as pack:
        assert pack.manifest.layout == {"name": "shards"}
        assert [file.is_shard for file in pack.index.files] == [True]
        part = pack.locate(0, 1, "gate")
        assert part.blob_offset is None
        with pytest.raises(RequestError, match="lies in no blob"):
            _ = part.offset_in_blob
        with pytest.raises(RequestError, match="has no blob: its parts lie apart"):
            pack.locate(0, 1)


@pytest.mark.parametrize("error", [StopHereError, KeyboardInterrupt])
def test_an_interruption_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    calls: list[int] = []

    def progress(length: int, total: int) -> None:
        calls.append(length)
        raise error

    with pytest.raises(error):
        index_model(first_shard("qwen3moe"), tmp_path / "i", digests=True, progress=progress)
    assert 1 <= len(calls) <= 6  # once in each thread
    assert os.listdir(tmp_path) == []


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    for digests in (False, True):
        steps: list[tuple[int, int]] = []
        add = steps.append
        index_model(
            first_shard("qwen3moe"),
            tmp_path / str(digests),
            digests=digests,
            progress=lambda *step, add=add: add(step),
        )
        (total,) = {total for _, total in steps}
        assert sum(length for length, _ in steps) == total
    assert total > 0.95 * sum(Path(path).stat().st_size for path in shards_of("qwen3moe"))


def test_a_shard_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = moe((0, 1)).write(tmp_path / "m.gguf")

    def progress(*_: int) -> None:
        flip(path, path.stat().st_size - 1)

    with pytest.raises(SourceError, match="changed while"):
        index_model(path, tmp_path / "index", digests=True, progress=progress)
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_shards_are_opened_as_they_lie_and_messages_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    shards = [tmp_path / Path(path).name for path in shards_of("qwen3moe")]
    for path, shard in zip(shards_of("qwen3moe"), shards, strict=True):
        shutil.copy(path, shard)
    with open_model(shards[2]) as pack:
        assert not list((tmp_path / "temporary").iterdir())
        assert (pack.path, list(pack.file_paths)) == (shards[0], shards)
        place = pack.locate(1, 3, "down")
        with pack.reader(backend="buffered") as reader:
            assert reader.read(1, 3, "down").nbytes == place.length
        place.path.write_bytes(b"")
        with (
            pack.reader(backend="buffered") as reader,
            pytest.raises(MoepackError, match=re.escape(str(place.path))),
        ):
            reader.read(1, 3, "down")
        assert place.path in shards


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model of several shards, with an index over them in `index`."""
    folder = tmp_path_factory.mktemp("killed") / "source"
    write_shards(split(moe((0, 1)), 3), folder)
    index_model(folder, folder.parent / "index")
    return folder


def assert_whole(target: Path, source: Path) -> None:
    assert contents(target) == contents(source.parent / "index")
    with moepack.open(target) as pack:
        assert pack.layers == (0, 1)


def leftover(target: Path) -> Path:
    """Make what a killed run of another model leaves: its links, and a file."""
    target.mkdir()
    for number in range(1, 4):
        (target / f"shard-{number:05}-of-00003.gguf").symlink_to("elsewhere")
    (target / "index.bin").write_bytes(b"half")
    return target


@pytest.mark.parametrize("name", ["index.bin", "notes", "shard-00001-of-00002.gguf", "folder/x"])
def test_what_is_not_of_a_killed_run_alone_stays(name: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "index" if name == "index.bin" else leftover(tmp_path / "index")
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_bytes(b"mine")
    before = sorted(os.listdir(target))
    with pytest.raises(RequestError, match="not empty"):
        index_model(source, target)
    assert sorted(os.listdir(target)) == before


def test_another_model_may_begin_where_one_was_killed(source: Path, tmp_path: Path) -> None:
    target = leftover(tmp_path / "index")
    index_model(source, target)
    assert_whole(target, source)


def test_a_run_that_goes_on_is_left_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds what the first has made so far, as after a kill."""
    target = tmp_path / "index"
    write = os.fsync
    names: list[str] = []

    def second(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", write)
        with pytest.raises(RequestError, match="another moepack is writing here"):
            index_model(source, target)
        names.extend(os.listdir(target))
        write(descriptor)

    target.mkdir()
    monkeypatch.setattr(os, "fsync", second)
    index_model(source, target)
    assert "index.bin" in names
    assert_whole(target, source)


def test_what_fails_after_the_commit_leaves_no_half_of_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def fail(old: Path, new: Path) -> None:
        replace(old, new)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(MachineError):
        index_model(source, tmp_path / "index")
    assert not (tmp_path / "index").exists()
