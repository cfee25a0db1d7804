"""A pack is ranked anew: changes, bytes that stay, and the leftovers of interruptions."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import MoepackError, PackError
from moepack.pack.format import manifest
from moepack.packing.plan.blob_hotness import load_hotness
from moepack.packing.plan.layout import load
from moepack.packing.writing.lock_file import LockFile
from moepack.storage.atomic import write_synced
from tests.support.interruptions import before_each, record_calls
from tests.support.models import FIXTURES, contents, first_shard, flip, hotness_of
from tests.support.pack_draft import Draft

HOTNESS = FIXTURES / "qwen3moe-hotness.csv"
OTHER = hotness_of({(0, 3): 9, (0, 1): 4, (1, 15): 7})


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """Pack a small real model, without hotness."""
    moepack.pack_model(first_shard("qwen3moe"), tmp_path / "pack")
    return tmp_path / "pack"


def data_files(pack: Path) -> dict[str, bytes]:
    return {
        name: data
        for name, data in contents(pack).items()
        if name.startswith(("experts-", "dense"))
    }


def test_the_index_is_the_one_that_packing_in_this_order_writes(pack: Path, tmp_path: Path) -> None:
    """But for the offsets of blobs, which stay."""
    before = data_files(pack)
    summary = moepack.rank_pack(pack, HOTNESS)
    assert data_files(pack) == before
    assert (summary.blob_count, summary.measured_blob_count) == (32, 32)
    assert summary.hotness_token_count == 192
    assert summary.is_changed
    assert moepack.verify(pack, first_shard("qwen3moe")).passed
    moepack.pack_model(first_shard("qwen3moe"), tmp_path / "other", hotness=HOTNESS)
    with moepack.open(pack) as ours, moepack.open(tmp_path / "other") as theirs:
        assert ours.hottest(1 << 40) == theirs.hottest(1 << 40)
        for layer in ours.layers:
            for expert in range(16):
                assert ours.hotness(layer, expert) == theirs.hotness(layer, expert)
        assert ours.manifest.hotness == theirs.manifest.hotness
        assert ours.manifest.index_entry.name == summary.index_name != "index.bin"
    assert set(os.listdir(pack)) == {*before, summary.index_name, "manifest.json"}


def test_a_second_ranking_replaces_the_first_and_the_same_one_changes_nothing(pack: Path) -> None:
    first = moepack.rank_pack(pack, HOTNESS)
    second = moepack.rank_pack(pack, OTHER)
    assert not (pack / first.index_name).exists()
    assert second.measured_blob_count == 32
    before = contents(pack)
    assert not moepack.rank_pack(pack, OTHER).is_changed
    assert contents(pack) == before
    more = moepack.rank_pack(pack, OTHER._replace(token_count=77))
    assert (more.index_name, more.is_changed) == (second.index_name, True)
    with moepack.open(pack) as opened:
        assert opened.manifest.hotness is not None
        assert opened.manifest.hotness["token_count"] == 77
    assert moepack.verify(pack).passed


def test_strong_digests_and_what_others_wrote_stay(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    moepack.pack_model(first_shard("qwen3moe"), pack, strong=True)
    draft = Draft(pack)
    draft.body["org.example.checked"] = {"by": "someone"}
    draft.body["index"]["org.example.copy"] = "elsewhere"
    draft.save()
    moepack.rank_pack(pack, HOTNESS)
    body = json.loads((pack / "manifest.json").read_text())
    assert body["org.example.checked"] == {"by": "someone"}
    assert body["index"]["org.example.copy"] == "elsewhere"
    assert moepack.verify(pack).passed
    with moepack.open(pack) as opened:
        assert opened.manifest.index_entry.sha256 is not None
        assert opened.index.strong_digest(0) is not None


@pytest.mark.parametrize("reads", [moepack.open, moepack.verify])
def test_a_pack_that_is_ranked_while_it_is_opened_opens_with_the_new_ranking(
    reads: Callable[[Path], Any], pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest was read already, and the index that it names is gone."""
    rankings: list[Any] = [HOTNESS, OTHER]

    def rank(*_: object) -> None:
        if rankings:
            moepack.rank_pack(pack, rankings.pop())

    before_each(monkeypatch, rank, (manifest, "decode"))
    opened = reads(pack)
    assert not rankings
    if isinstance(opened, moepack.Pack):
        assert opened.manifest_bytes == (pack / "manifest.json").read_bytes()
        opened.close()
    else:
        assert (opened.passed, opened.findings) == (True, ())


def test_one_at_a_time(pack: Path) -> None:
    lock = LockFile(pack / "pack.journal")
    try:
        with pytest.raises(MoepackError, match="another moepack"):
            moepack.rank_pack(pack, HOTNESS)
    finally:
        lock.close()
    moepack.rank_pack(pack, HOTNESS)
    assert not (pack / "pack.journal").exists()


def test_it_is_committed_by_one_rename_of_what_is_on_the_drive(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is synced before that, and after it; the manifest is never written in place."""
    os.link(pack / "manifest.json", pack.parent / "linked")
    before = (pack / "manifest.json").read_bytes()
    events = record_calls(monkeypatch)
    name = moepack.rank_pack(pack, HOTNESS).index_name
    assert (pack.parent / "linked").read_bytes() == before
    at = events.index("manifest.json.tmp -> manifest.json")
    assert name in events[:at]
    assert "pack" in events[events.index("manifest.json.tmp") : at]
    assert events[at + 1 : at + 3] == ["pack", "remove index.bin"]


def test_who_was_overtaken_by_another_ranking_leaves_it(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "moepack.packing.ranking.load_hotness"

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.setattr(name, load_hotness)
        moepack.rank_pack(pack, OTHER)
        return load_hotness(*arguments)

    monkeypatch.setattr(name, overtaken)
    with pytest.raises(PackError, match="another process ranked it meanwhile"):
        moepack.rank_pack(pack, HOTNESS)
    assert not (pack / "pack.journal").exists()
    other = Path(shutil.copytree(pack, pack.parent / "other"))
    assert not moepack.rank_pack(other, OTHER).is_changed
    assert moepack.verify(pack).passed


def test_data_files_that_are_named_like_an_index_stay(tmp_path: Path) -> None:
    layout = replace(load("layers"), file_name="index-000000000000000{layer}.bin")
    moepack.pack_model(first_shard("qwen3moe"), tmp_path / "pack", layout=layout)
    before = contents(tmp_path / "pack")
    assert "index-0000000000000001.bin" in before
    for hotness in (HOTNESS, OTHER):
        moepack.rank_pack(tmp_path / "pack", hotness)
    after = contents(tmp_path / "pack")
    for name in before.keys() - {"index.bin", "manifest.json"}:
        assert after[name] == before[name]
    assert len(after) == len(before)
    assert moepack.verify(tmp_path / "pack").passed


def test_an_index_that_stays_is_not_written_again(pack: Path) -> None:
    """Readers may have it open."""
    index = pack / moepack.rank_pack(pack, OTHER).index_name
    before = index.stat()
    again = moepack.rank_pack(pack, OTHER._replace(token_count=7))
    assert (again.index_name, again.is_changed) == (index.name, True)
    assert index.stat().st_mtime_ns == before.st_mtime_ns


def write_badly(path: Path, data: bytes) -> None:
    write_synced(path, bytes([data[0] ^ 1]) + data[1:])


def reveal_the_drive(paths: list[Path]) -> None:
    """Show that a drive has other bytes than the page cache."""
    for path in paths:
        if path.exists():
            flip(path, 0)


@pytest.mark.parametrize(
    ("function", "fault"), [("write_synced", write_badly), ("drop", reveal_the_drive)]
)
def test_what_is_not_read_back_as_it_was_written_is_not_committed(
    function: str, fault: Callable[..., None], pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(pack)
    monkeypatch.setattr(f"moepack.packing.writing.commit.{function}", fault)
    with pytest.raises(MoepackError, match="other bytes than were written"):
        moepack.rank_pack(pack, HOTNESS)
    after = contents(pack)
    assert {name: after[name] for name in before} == before
