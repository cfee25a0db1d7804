"""A pack is ranked anew: what changes, what stays, and what an interruption leaves."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.errors import MoepackError, PackError, TraceError
from moepack.packing.chosen_hotness import load_hotness
from moepack.packing.layout import load
from moepack.packing.line_log import open_log
from moepack.storage.atomic import write_synced
from tests.support import gguf_builder
from tests.support.models import FIXTURES, contents, first_shard, hotness_of, pack_model
from tests.support.pack_draft import Draft, strong_digests

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
    """But for where blobs lie: they stay where they are."""
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


def test_what_others_wrote_stays(pack: Path) -> None:
    draft = Draft(pack)
    strong_digests()(draft)
    draft.body["org.example.checked"] = {"by": "someone"}
    draft.body["index"]["org.example.copy"] = "elsewhere"
    draft.save()
    moepack.rank_pack(pack, HOTNESS)
    body = json.loads((pack / "manifest.json").read_text())
    assert body["org.example.checked"] == {"by": "someone"}
    assert body["index"]["org.example.copy"] == "elsewhere"
    assert moepack.verify(pack).passed


def test_chunk_experts_are_ranked_as_packing_ranks_them(tmp_path: Path) -> None:
    builder = gguf_builder.moe((), 4, architecture="grovemoe", ne=(4, 2), block_count=1)
    builder.put("grovemoe.experts_per_group", "u32", 2)
    for name in ("gate", "up", "down"):
        builder.tensor(f"blk.0.ffn_{name}_exps.weight", (4, 2, 4), gguf_builder.F32, 16)
        builder.tensor(f"blk.0.ffn_{name}_chexps.weight", (4, 2, 2), gguf_builder.F32, 16)
    model = builder.write(tmp_path / "m.gguf")
    hotness = hotness_of({(0, 0): 2, (0, 3): 5})
    moepack.pack_model(model, tmp_path / "hot", hotness=hotness)
    moepack.pack_model(model, tmp_path / "pack")
    moepack.rank_pack(tmp_path / "pack", hotness)
    with moepack.open(tmp_path / "pack") as ours, moepack.open(tmp_path / "hot") as theirs:
        for family in theirs.families(0):
            for expert in range(theirs.expert_count(0, family=family)):
                hot = theirs.hotness(0, expert, family=family)
                assert ours.hotness(0, expert, family=family) == hot


def test_hotness_of_another_model_changes_nothing(pack: Path) -> None:
    before = contents(pack)
    with pytest.raises(TraceError, match="no such expert"):
        moepack.rank_pack(pack, hotness_of({(0, 99): 1}))
    assert contents(pack) == before


def test_one_at_a_time(pack: Path) -> None:
    lock = open_log(pack / "pack.journal")
    try:
        with pytest.raises(MoepackError, match="another moepack"):
            moepack.rank_pack(pack, HOTNESS)
    finally:
        lock.close()
    moepack.rank_pack(pack, HOTNESS)
    assert not (pack / "pack.journal").exists()


def test_whatever_interrupts_it_leaves_the_old_ranking_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step, and the next ranking removes what is left."""
    pack_model([first_shard("qwen3moe")], tmp_path / "base", counts={(0, 1): 3})
    with moepack.open(tmp_path / "base") as opened:
        old = opened.hottest(1 << 40)
    moepack.rank_pack(shutil.copytree(tmp_path / "base", tmp_path / "new"), OTHER)
    new = contents(tmp_path / "new")

    class CrashError(BaseException):
        """The process ends here."""

    def crashing(call: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise CrashError
            return call(*arguments, **options)

        return step

    for steps in range(40):
        pack = Path(shutil.copytree(tmp_path / "base", tmp_path / f"pack {steps}"))
        left = [steps]
        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "unlink", "write"):
                patch.setattr(os, name, crashing(getattr(os, name), left))
            with contextlib.suppress(CrashError):
                moepack.rank_pack(pack, OTHER)
        assert moepack.verify(pack).passed
        with moepack.open(pack) as opened:
            is_new = opened.hottest(1 << 40) != old
        moepack.rank_pack(pack, OTHER)
        assert contents(pack) == new
        if left[0] >= 0:
            break
    assert is_new
    assert steps > 8


def test_it_is_committed_by_one_rename_of_what_is_on_the_drive(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is synced before that, and after it; the manifest is never written in place."""
    events: list[str] = []
    fsync, replace_file, unlink = os.fsync, os.replace, os.unlink

    def synced(descriptor: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        events.append(f"{source.name} -> {target.name}")
        replace_file(source, target)

    def unlinked(path: Path, **options: Any) -> None:
        events.append(f"remove {path.name}")
        unlink(path, **options)

    os.link(pack / "manifest.json", pack.parent / "linked")
    before = (pack / "manifest.json").read_bytes()
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "unlink", unlinked)
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


def test_what_is_not_read_back_as_it_was_written_is_not_committed(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(pack)
    write = write_synced

    def write_badly(path: Path, data: bytes) -> None:
        write(path, bytes([data[0] ^ 1]) + data[1:])

    monkeypatch.setattr("moepack.packing.ranking.write_synced", write_badly)
    with pytest.raises(MoepackError, match="not what was written"):
        moepack.rank_pack(pack, HOTNESS)
    after = contents(pack)
    assert {name: after[name] for name in before} == before
