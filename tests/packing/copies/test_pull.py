"""Pulls of packs: whole ones are the same to the byte, parts are what they say that they are."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, PackError, RequestError
from moepack.common.pack_files import is_pack
from moepack.pack.mounting.mount import mount
from moepack.pack.reading import copies
from moepack.packing.copies.pull import PullSummary
from tests.support.damages import DAMAGES, Damage
from tests.support.hubs import REPOSITORY, hub_of
from tests.support.interruptions import CrashError, crash_after, record_calls
from tests.support.machine_faults import Room
from tests.support.models import first_shard, flip, hotness_of, on_disk
from tests.support.pulls import MARKS, check_part, copy_pack, is_same
from tests.support.remote_servers import Fault, FileServer

pytestmark = pytest.mark.long

LAYER_1 = {(1, expert) for expert in range(16)}


# All of it


def test_a_pack_that_is_pulled_is_the_pack_to_the_byte(
    address: str, hot_pack: Path, tmp_path: Path
) -> None:
    done: list[tuple[int, int]] = []
    plans: list[PullSummary] = []
    summary = moepack.pull(
        address, tmp_path / "here", planned=plans.append, progress=lambda *both: done.append(both)
    )
    assert is_same(tmp_path / "here", hot_pack)
    assert (summary.is_whole, summary.expert_count, summary.missing_layers) == (True, 32, ())
    assert summary.length == summary.all_length == plans[0].length
    assert plans[0].fetched_length is None
    assert summary.fetched_length is not None
    both_length = summary.fetched_length + summary.digests.known_length  # and it is read back
    assert sum(length for length, _ in done) == both_length
    assert {total for _, total in done} == {both_length}
    again = moepack.pull(address, tmp_path / "here")
    assert (again.fetched_length, again.is_whole) == (0, True)


def test_every_kind_of_pack_can_be_pulled(
    packs: dict[str, Path], store: FileServer, tmp_path: Path
) -> None:
    """Small parts, fused ones, several families."""
    for model, path in packs.items():
        copy_pack(path, store.folder, model)
        moepack.pull(f"{store.url}/{model}", tmp_path / f"{model}-here")
        assert is_same(tmp_path / f"{model}-here", path)


def test_refused_cut_and_wrong_answers_still_give_the_same_pack(
    store: FileServer, address: str, hot_pack: Path, tmp_path: Path
) -> None:
    """Of a hundred answers 20 are refused, 20 are cut off, and two others are wrong."""

    def fault(number: int) -> Fault:
        draw = number * 37 % 100
        wrong: Fault = "other bytes" if number in (5, 9) else None
        return "status" if draw < 20 else "cut" if draw < 40 else wrong

    store.fault = fault
    moepack.pull(address, tmp_path / "here")
    assert is_same(tmp_path / "here", hot_pack)


def test_a_pack_that_is_damaged_there_is_never_committed(
    store: FileServer, address: str, hot_pack: Path, tmp_path: Path
) -> None:
    with moepack.Pack(hot_pack) as pack:
        where = pack.locate(1, 7, "up")
    damaged = store.folder / "a.moepack" / where.path.name
    flip(damaged, where.offset + 11)
    with pytest.raises(PackError, match="layer 1 expert 7 ffn_up_exps.weight") as refusal:
        moepack.pull(address, tmp_path / "here")
    assert "moepack verify http" in str(refusal.value.hint)
    assert not (tmp_path / "here" / "manifest.json").exists()
    assert (1, 7) not in check_part(tmp_path / "here", hot_pack)
    flip(damaged, where.offset + 11)
    moepack.pull(address, tmp_path / "here")
    assert is_same(tmp_path / "here", hot_pack)


def test_a_file_that_is_missing_or_short_there_is_named(
    store: FileServer, address: str, tmp_path: Path
) -> None:
    file = store.folder / "a.moepack" / "experts-00001.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-4096])
    with pytest.raises(PackError, match="not as long as the manifest says") as refusal:
        moepack.pull(address, tmp_path / "here")
    assert refusal.value.path == f"{address}/experts-00001.bin"
    file.unlink()
    with pytest.raises(PackError, match="the file is missing"):
        moepack.pull(address, tmp_path / "here")


def test_padding_comes_from_nobody(
    store: FileServer, address: str, hot_pack: Path, tmp_path: Path
) -> None:
    """Bytes that no digest covers are zeros by the format, whatever a store sends."""
    with moepack.Pack(hot_pack) as pack:
        where = pack.locate(0, 3)
    flip(store.folder / "a.moepack" / where.path.name, where.offset + where.length - 1)
    moepack.pull(address, tmp_path / "here")
    assert is_same(tmp_path / "here", hot_pack)


# A part of it


def test_layers_come_with_the_dense_part(address: str, hot_pack: Path, tmp_path: Path) -> None:
    summary = moepack.pull(address, tmp_path / "here", layers="1")
    assert check_part(tmp_path / "here", hot_pack) == LAYER_1
    assert (summary.layers, summary.missing_layers, summary.is_whole) == ((1,), (0,), False)
    names = set(os.listdir(tmp_path / "here"))
    assert names >= MARKS
    assert "manifest.json" not in names
    file = tmp_path / "here" / "experts-00000.bin"
    assert file.stat().st_size == (hot_pack / file.name).stat().st_size
    assert file.stat().st_blocks == 0


def test_the_hottest_are_those_of_the_ranking(address: str, hot_pack: Path, tmp_path: Path) -> None:
    summary = moepack.pull(address, tmp_path / "here", hottest="500kB")
    with moepack.Pack(hot_pack) as pack:
        hottest = set(pack.hottest("500kB"))
    assert check_part(tmp_path / "here", hot_pack) == hottest
    assert summary.expert_count == len(hottest)
    assert 0 < len(hottest) < 32


def test_another_pull_adds_to_what_is_there_until_it_is_the_pack(
    store: FileServer, address: str, hot_pack: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    first = moepack.pull(address, here, layers=[1])
    before = store.traffic.sent_length
    second = moepack.pull(address, here, hottest="500kB")
    with moepack.Pack(hot_pack) as pack:
        assert check_part(here, hot_pack) == LAYER_1 | set(pack.hottest("500kB"))
    assert second.kept_length == first.length
    assert store.traffic.sent_length - before < 400_000
    assert moepack.pull(None, here, resume=True).fetched_length == 0
    assert moepack.pull(address, here).is_whole
    assert is_same(here, hot_pack)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_mended_before_it_becomes_the_pack(
    damage: Damage, address: str, hot_pack: Path, tmp_path: Path
) -> None:
    """No stamp tells of the damage: everything that is kept is read."""
    here = tmp_path / "here"
    moepack.pull(address, here, layers="1")
    damage(here / "experts-00001.bin")
    done = moepack.pull(address, here)
    assert is_same(here, hot_pack)
    assert done.is_whole
    assert done.mended_length > 0
    assert done.digests.compared_length == done.digests.known_length


def test_what_cannot_be_pulled_is_named_and_nothing_is_left(
    packs: dict[str, Path], store: FileServer, address: str, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    moepack.index_model(first_shard("granite"), store.folder / "index")
    with pytest.raises(PackError, match="the shard is missing"):
        moepack.pull(f"{store.url}/index", here)
    copy_pack(packs["granite"], store.folder, "granite")
    with pytest.raises(RequestError, match="no hotness was measured"):
        moepack.pull(f"{store.url}/granite", here, hottest="1MiB")
    with pytest.raises(RequestError, match="no layer 7"):
        moepack.pull(address, here, layers="0,7")
    with pytest.raises(RequestError, match="not a list of layers"):
        moepack.pull(address, here, layers="a")
    with pytest.raises(RequestError, match="nothing to resume"):
        moepack.pull(None, here, resume=True)
    with pytest.raises(RequestError, match="not the address of a pack"):
        moepack.pull(tmp_path, here)
    with pytest.raises(PackError, match="no pack here"):
        moepack.pull(f"{address}-2", here)
    assert not here.exists()
    here.mkdir()
    (here / "holiday.jpg").write_text("x")
    with pytest.raises(RequestError, match="not empty, and not a partial pack"):
        moepack.pull(address, here)
    assert os.listdir(here) == ["holiday.jpg"]


def test_a_part_looks_like_a_pack_to_nobody_else(
    address: str, hot_pack: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    moepack.pull(address, here, layers="1")
    assert is_pack(here), "its files are spared"
    (tmp_path / "second").mkdir()
    refused: dict[str, Callable[[], object]] = {
        "restore": lambda: moepack.restore(here, tmp_path / "shards"),
        "restore in place": lambda: moepack.restore(here, tmp_path / "shards", in_place=True),
        "export": lambda: moepack.export("gguf", here, tmp_path / "model.gguf"),
        "mirror": lambda: moepack.mirror_pack(here, tmp_path / "second"),
        "rank": lambda: moepack.rank_pack(here, hotness_of({(0, 1): 2})),
        "mount": lambda: mount(here, tmp_path / "second"),
        "tensor": lambda: moepack.Pack(here).tensor(0, 0, "up"),
    }
    for name, call in refused.items():
        with pytest.raises(RequestError, match="a part of the pack is not here") as refusal:
            call()
        assert f"moepack pull {address} -o {here}" in str(refusal.value.hint), name
    with pytest.raises(RequestError):
        moepack.pack_model(first_shard("qwen3moe"), here)
    check_part(here, hot_pack)
    with moepack.Pack(here) as pack:
        assert pack.tensor(1, 0, "up").size
        assert pack.dense_tensor("output_norm.weight").size


# Whatever interrupts it


def test_what_comes_is_synced_before_it_is_named(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record_calls(monkeypatch)
    moepack.pull(address, tmp_path / "here", threads=2)
    named = max(n for n, event in enumerate(events) if event.endswith("-> .pull.json"))
    for name in ("experts-00000.bin", "experts-00001.bin", "dense.bin"):
        written = max(n for n, event in enumerate(events) if event == f"write {name}")
        assert name in events[written:named]
    assert "manifest.json.tmp -> manifest.json" in events[named:]
    assert events.index("remove .pull.json") > events.index("manifest.json.tmp -> manifest.json")


def test_what_was_written_and_not_named_yet_is_kept(
    address: str, hot_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill: the bytes themselves tell that they are right."""
    here = tmp_path / "here"
    with monkeypatch.context() as patch:
        crash_after(patch, 60)
        with pytest.raises(CrashError):
            moepack.pull(address, here, threads=1)
    assert not check_part(here, hot_pack)
    assert moepack.pull(address, here).kept_length > 400_000
    assert is_same(here, hot_pack)


def test_a_drive_without_space_is_named_before_anything_comes(
    store: FileServer, address: str, tmp_path: Path, room: Room
) -> None:
    (tmp_path / "small").mkdir()
    small = room.mount(tmp_path / "small", "-t", "tmpfs", "-o", "size=600k", "none")
    with pytest.raises(MachineError, match="not enough space"):
        moepack.pull(address, small / "here")
    assert not (small / "here").exists()
    assert len(store.traffic.gets()) == 2
    assert moepack.pull(address, small / "here", hottest="100kB").expert_count


# Changes


def test_what_was_changed_since_is_looked_at_again(
    address: str, hot_pack: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    moepack.pull(address, here, layers="1")
    with moepack.Pack(here) as pack:
        where = pack.locate(1, 4)
    flip(where.path, where.offset + 9)
    (finding,) = moepack.verify(here).findings
    assert (finding.layer, finding.expert) == (1, 4)
    assert 0 < (moepack.pull(address, here, layers="1").fetched_length or 0) < 200_000
    assert check_part(here, hot_pack) == LAYER_1
    where.path.unlink()
    moepack.pull(address, here, layers="1")
    assert check_part(here, hot_pack) == LAYER_1


def test_a_pack_that_was_replaced_there_is_never_mixed_with_the_old_one(
    store: FileServer, address: str, hot_pack: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    moepack.pull(address, here, layers="1")
    shutil.rmtree(store.folder / "a.moepack")
    moepack.pack_model(first_shard("qwen3moe"), store.folder / "a.moepack", layout="natural")
    for add in ({"layers": "0"}, {}, {"resume": True}):
        with pytest.raises(PackError, match="a part of another pack is here"):
            moepack.pull(address, here, **add)
    for check in ("always", "never"):
        with moepack.Pack(here) as pack, pack.reader(check=check) as reader:
            assert reader.read(1, 3)
            with pytest.raises(MachineError, match="another pack is there now") as refusal:
                reader.read(0, 3)
            assert "into a new folder" in str(refusal.value.hint)
    assert check_part(here, hot_pack) == LAYER_1


def test_a_pack_that_was_pulled_is_not_replaced_by_another(
    store: FileServer, address: str, hot_pack: Path, tmp_path: Path
) -> None:
    moepack.pull(address, tmp_path / "here")
    shutil.rmtree(store.folder / "a.moepack")
    moepack.pack_model(first_shard("granite"), store.folder / "a.moepack")
    with pytest.raises(RequestError, match="another pack is here already"):
        moepack.pull(address, tmp_path / "here")
    assert is_same(tmp_path / "here", hot_pack)


def test_a_record_with_any_byte_changed_or_cut_is_refused_and_mended(
    store: FileServer, address: str, hot_pack: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    moepack.pull(address, here, layers="1")
    path = here / ".pull.json"
    data = path.read_bytes()
    record = copies.decode(data, path)
    assert copies.encode(record) == data
    for offset in range(len(data)):
        wrong = data[:offset] + bytes([data[offset] ^ 0x20]) + data[offset + 1 :]
        for bad in (wrong, data[:offset]):
            with pytest.raises(PackError, match="damaged, or of another version"):
                copies.decode(bad, path)
    path.write_bytes(data[:-1])
    with pytest.raises(PackError, match="damaged") as refusal:
        moepack.open(here)
    assert "pull the pack into this folder again" in str(refusal.value.hint)
    before = store.traffic.sent_length
    moepack.pull(address, here, layers="1")
    assert store.traffic.sent_length - before < 100_000, "the bytes were right"
    assert check_part(here, hot_pack) == LAYER_1
    flip(here / ".pull.manifest", 99)
    with pytest.raises(PackError, match="manifest of a partial pack is missing or damaged"):
        moepack.open(here)
    flip(here / "index.bin", 99)
    moepack.pull(address, here, layers="1")
    assert check_part(here, hot_pack) == LAYER_1


def test_a_pack_on_the_hub_is_pulled_from_its_commit(
    hot_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here, address = tmp_path / "here", f"hf://{REPOSITORY}/{hot_pack.name}"
    with hub_of(tmp_path / "hub", monkeypatch, [hot_pack]) as hub:
        origin = f"hf://{REPOSITORY}@{hub.commit}/{hot_pack.name}"
        assert moepack.pull(address, here, layers="0").origin == origin
        with moepack.Pack(here) as part, moepack.Pack(hot_pack) as whole, part.reader() as reader:
            assert reader.read(1, 5) == on_disk(whole.locate(1, 5))
        moepack.pull(address, here)
    assert is_same(here, hot_pack)
