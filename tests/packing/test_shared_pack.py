"""Packs that several processes write: the bytes of a pack made alone, whatever happens to them."""

import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import MoepackError, RequestError, SourceError
from moepack.common.paths import RemotePath
from moepack.pack.verifying.verifier import verify
from moepack.packing.copies.pull import pull
from moepack.packing.pack_model import SharedPack, pack_model
from moepack.packing.plan.pack_summary import PackSummary
from moepack.packing.restore import restore
from moepack.packing.writing import target as targets
from moepack.packing.writing.target import SharedFolder, open_target
from moepack.storage import inputs
from moepack.storage.input_file import Stamp
from moepack.storage.remote import store as remote_store
from moepack.storage.remote.stores import store_of
from tests.support.buckets import bucket_of_moto, objects
from tests.support.children import MOEPACK
from tests.support.damages import DAMAGES, Damage
from tests.support.hubs import REPOSITORY, hub_of
from tests.support.models import contents, flip, hotness_of, shards_of

MODEL = "deepseek2"
HOTNESS = hotness_of({(3, 3): 5, (3, 1): 9, (2, 0): 2})
OTHER_HOTNESS = hotness_of({(3, 1): 5, (3, 3): 9, (2, 0): 2})
PARTS = 2

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of the pack that one process makes."""
    folder = tmp_path_factory.mktemp("alone") / "pack"
    pack_model(shards_of(MODEL), folder, hotness=HOTNESS)
    return contents(folder)


def shared(target: Path | str, **choices: Any) -> SharedPack:
    return SharedPack(shards_of(MODEL), target, **{"hotness": HOTNESS, **choices})


def pack(target: Path | str, **options: Any) -> PackSummary:
    return pack_model(shards_of(MODEL), target, **{"hotness": HOTNESS, **options})


def write_parts(target: Path | str, **choices: Any) -> None:
    for number in range(1, PARTS + 1):
        shared(target, **choices).write_part((number, PARTS))


def test_parts_that_share_a_folder_alone_become_the_pack_of_one_process(
    alone: dict[str, bytes], tmp_path: Path
) -> None:
    command = [*MOEPACK, "pack", *shards_of(MODEL), "-o", "pack"]
    parts = ("1/2", "2/2")
    nodes = [subprocess.Popen([*command, "--part", part], cwd=tmp_path) for part in parts]
    assert [node.wait() for node in nodes] == [0, 0]
    assert not (tmp_path / "pack" / "manifest.json").exists()
    done = subprocess.run([*command, "--commit", "--json"], cwd=tmp_path, check=True)
    assert done.returncode == 0
    pack_model(shards_of(MODEL), tmp_path / "other")
    assert contents(tmp_path / "pack") == contents(tmp_path / "other")


def test_parts_are_written_by_the_workers_of_a_pool(
    alone: dict[str, bytes], tmp_path: Path
) -> None:
    sharing = shared(tmp_path / "pack")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(sharing.write_part, [(n, PARTS) for n in range(1, PARTS + 1)]))
    sharing.commit()
    assert contents(tmp_path / "pack") == alone


def test_nothing_is_committed_before_all_parts_are_written(
    alone: dict[str, bytes], tmp_path: Path
) -> None:
    first = shared(tmp_path / "pack").write_part("1/3")
    assert first.written_length
    assert first.missing_file_count == first.file_count - 1
    assert not list(tmp_path.glob("pack/pack.records/writing*"))
    again = shared(tmp_path / "pack").write_part("1/3")
    assert (again.written_length, again.resumed_file_count) == (0, 1)
    with pytest.raises(RequestError, match="data files are not finished, found missing"):
        shared(tmp_path / "pack").commit()
    write_parts(tmp_path / "pack")
    done = shared(tmp_path / "pack").commit()
    assert (done.written_length, done.resumed_file_count) == (0, 0)
    assert contents(tmp_path / "pack") == alone
    assert shared(tmp_path / "pack").write_part("1/3").is_finished


@pytest.mark.parametrize(
    "change",
    [
        {"hotness": OTHER_HOTNESS},
        {"hotness": None},
        {"layout": "natural"},
    ],
    ids=["counts", "no counts", "layout"],
)
def test_parts_of_other_input_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    shared(tmp_path / "pack").write_part("1/3")
    with pytest.raises(RequestError, match="made from other input"):
        shared(tmp_path / "pack", **change).write_part("2/3")


def test_parts_and_packs_of_one_process_do_not_meet(tmp_path: Path) -> None:
    shared(tmp_path / "pack").write_part("1/3")
    for resume in (False, True):
        with pytest.raises(RequestError, match="parts of a pack are here"):
            pack(tmp_path / "pack", resume=resume)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pack.journal").write_bytes(b"")
    with pytest.raises(RequestError, match="not an unfinished pack of several"):
        shared(tmp_path / "other").write_part("1/3")
    with pytest.raises(MoepackError, match="not a whole pack"):
        verify(tmp_path / "pack")


def test_a_record_of_other_input_is_not_trusted(tmp_path: Path) -> None:
    """Whoever removes input.json, as damaged, does not make files of another pack right."""
    write_parts(tmp_path / "pack", hotness=None)
    (tmp_path / "pack" / "pack.records" / "input.json").unlink()
    with pytest.raises(RequestError, match="not empty"):
        shared(tmp_path / "pack").write_part("1/3")
    (tmp_path / "pack" / "pack.records" / "input.json").write_bytes(b"{}")
    with pytest.raises(RequestError, match="are not finished"):
        shared(tmp_path / "pack").commit()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_data_file_is_found_and_written_again(
    damage: Damage, alone: dict[str, bytes], tmp_path: Path
) -> None:
    """By the commit, and by the part that had written it; no stamp tells of it."""
    target, name = tmp_path / "pack", "experts-00002.bin"
    write_parts(target)
    damage(target / name)
    with pytest.raises(RequestError, match="data files are not finished"):
        shared(target).commit()
    write_parts(target)
    damage(target / name)
    again = shared(target).write_part("1/1")
    assert again.written_length == len(alone[name])
    assert again.resumed_file_count == again.file_count - 1
    assert again.digests.compared_length == again.digests.known_length > 0
    shared(target).commit()
    assert contents(target) == alone


def test_a_finished_file_that_cannot_be_read_is_written_again(
    alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(tmp_path / "pack")
    with monkeypatch.context() as patch:
        patch.setattr(targets, "is_whole", raise_io_error)
        again = shared(tmp_path / "pack").write_part("1/1")
    assert (again.resumed_file_count, again.written_length) == (0, again.data_length)


def raise_io_error(*_: object) -> bool:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_part_killed_at_any_moment_is_run_again(alone: dict[str, bytes], tmp_path: Path) -> None:
    choices = random.Random(7)
    for trial in range(2):
        target = tmp_path / f"pack-{trial}"
        command = [*MOEPACK, "pack", *shards_of(MODEL), "-o", str(target), "--part", "1/1"]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not target.exists() and time.monotonic() < deadline and run.poll() is None:
            time.sleep(0.001)
        time.sleep(choices.uniform(0, 0.05))
        run.send_signal(signal.SIGKILL)
        run.wait()
        SharedPack(shards_of(MODEL), target).write_part("1/1")
        SharedPack(shards_of(MODEL), target).commit()
        assert not (target / "pack.records").exists(), "what was killed has left nothing"
        assert verify(target, shards_of(MODEL)).passed


def test_two_that_commit_at_once_make_one_pack(alone: dict[str, bytes], tmp_path: Path) -> None:
    for trial in range(3):
        target = tmp_path / f"pack-{trial}"
        write_parts(target)
        with ThreadPoolExecutor(3) as threads:
            commits = [threads.submit(shared(target).commit) for _ in range(3)]
        problems = [str(one.exception()) for one in commits if one.exception()]
        assert all("a whole pack is here already" in problem for problem in problems)
        assert len(problems) < 3
        assert contents(target) == alone


@pytest.mark.parametrize("is_remote", [False, True])
def test_one_that_others_overtake_as_it_begins_sees_their_input(
    is_remote: bool, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{bucket}/overtaken" if is_remote else str(tmp_path / "pack")
    folder = type(open_target(target, is_alone=False))
    create = folder.create

    def create_later(*arguments: Any) -> bool:
        monkeypatch.setattr(folder, "create", create)
        shared(target, hotness=None).write_part("1/3")
        return create(*arguments)

    monkeypatch.setattr(folder, "create", create_later)
    with pytest.raises(RequestError, match="made from other input"):
        shared(target).write_part("2/3")


def test_one_whose_parts_others_finish_meanwhile_counts_them(
    alone: dict[str, bytes], tmp_path: Path
) -> None:
    steps: list[tuple[int, int]] = []

    def note(count: int, total: int) -> None:
        if not steps:
            shared(tmp_path / "pack").write_part("1/1")
        steps.append((count, total))

    done = shared(tmp_path / "pack", progress=note).write_part("1/1")
    assert sum(count for count, _ in steps) == steps[-1][1] == done.data_length
    assert done.written_length != done.data_length
    shared(tmp_path / "pack").commit()
    assert contents(tmp_path / "pack") == alone


def test_one_that_others_overtake_in_the_commit_finds_the_pack_made(
    alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(tmp_path / "pack")
    stamps = SharedFolder.stamps

    def stamps_of_before(folder: SharedFolder) -> dict[str, Stamp]:
        monkeypatch.undo()
        before = stamps(folder)
        shared(tmp_path / "pack").commit()
        return before

    monkeypatch.setattr(SharedFolder, "stamps", stamps_of_before)
    shared(tmp_path / "pack").commit()
    assert contents(tmp_path / "pack") == alone


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with bucket_of_moto() as address:
        yield address


def test_a_pack_in_a_bucket_has_the_bytes_of_one_on_the_disk(
    alone: dict[str, bytes], bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_store, "UPLOAD_LENGTH", 5 << 20)
    pack(f"{bucket}/one.moepack")
    assert objects(f"{bucket}/one.moepack") == alone
    assert verify(f"{bucket}/one.moepack", shards_of(MODEL)).passed
    assert pull(f"{bucket}/one.moepack", tmp_path / "here").is_whole
    assert contents(tmp_path / "here") == alone
    for again in (
        pack(f"{bucket}/one.moepack"),
        pack(f"{bucket}/one.moepack", resume=True),
        shared(f"{bucket}/one.moepack").write_part("1/2"),
        shared(f"{bucket}/one.moepack").commit(),
    ):
        assert (again.is_finished, again.written_length) == (True, 0)
    for dry_run in (True, False):
        with pytest.raises(RequestError, match="a whole pack is here already"):
            pack(f"{bucket}/one.moepack", layers="2", dry_run=dry_run)
    assert objects(f"{bucket}/one.moepack") == alone


def test_parts_that_share_a_bucket_alone_are_committed_once(
    alone: dict[str, bytes], bucket: str
) -> None:
    write_parts(f"{bucket}/parts.moepack")
    with ThreadPoolExecutor(2) as threads:
        commits = [threads.submit(shared(f"{bucket}/parts.moepack").commit) for _ in range(2)]
    problems = [str(one.exception()) for one in commits if one.exception()]
    assert all("a whole pack is here already" in problem for problem in problems)
    assert objects(f"{bucket}/parts.moepack") == alone


def test_an_object_that_was_changed_is_not_committed(alone: dict[str, bytes], bucket: str) -> None:
    address = RemotePath(f"{bucket}/changed.moepack")
    write_parts(str(address))
    store_of(address).put(f"{address.key}/dense.bin", bytes(len(alone["dense.bin"])))
    with pytest.raises(RequestError, match="damaged dense.bin"):
        shared(str(address)).commit()


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("https://127.0.0.1:1/pack", "nothing can be written there"),
        ("s3://bucket", "a bucket, not a folder in it"),
    ],
)
def test_what_cannot_be_written_to_is_refused(target: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        pack(target)


def test_a_forked_worker_is_told_that_stores_do_not_work_there(bucket: str, tmp_path: Path) -> None:
    store = store_of(RemotePath(bucket))
    store.put("forked", b"1")
    with (
        ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool,
        pytest.raises(OSError, match="cannot be used in a forked process"),
    ):
        pool.submit(store_in_fork, bucket).result()


def store_in_fork(address: str) -> bytes:
    return store_of(RemotePath(address)).read("forked", 1)


def test_parts_of_a_model_on_the_hub_are_checked_before_they_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_GAP", 0)  # else a worker reads these small shards whole
    with hub_of(tmp_path / "hub", monkeypatch, shards_of(MODEL)) as hub:
        source = f"hf://{REPOSITORY}"
        SharedPack(source, tmp_path / "pack").write_part("1/2")
        SharedPack(source, tmp_path / "pack").write_part("2/2")
        SharedPack(source, tmp_path / "pack").commit()
        assert verify(tmp_path / "pack", shards_of(MODEL), sha256=True).passed

        def lie(summary: object) -> None:
            hub.content.fault = lambda number: "other bytes"

        SharedPack(source, tmp_path / "lies").write_part("1/2")
        SharedPack(source, tmp_path / "lies", planned=lie).write_part("2/2")
        hub.content.fault = lambda number: None
        with pytest.raises(SourceError, match="other bytes than the hub states"):
            SharedPack(source, tmp_path / "lies").commit()
        assert not (tmp_path / "lies" / "manifest.json").exists()


def test_parts_of_a_verification_look_at_all_of_a_pack_together(
    alone: dict[str, bytes], tmp_path: Path
) -> None:
    pack(tmp_path / "pack")
    whole = verify(tmp_path / "pack", shards_of(MODEL))
    parts = ("1/3", "2/3", "3/3")
    reports = [verify(tmp_path / "pack", shards_of(MODEL), part=part) for part in parts]
    assert [report.passed for report in reports] == [None, None, None]
    for field in ("read_length", "compared_length", "checked_blob_count", "checked_tensor_count"):
        assert sum(getattr(one, field) for one in reports) == getattr(whole, field), field
    assert "parts 2-3 of 3" in reports[0].not_looked_at
    assert verify(tmp_path / "pack", part="1/1").passed
    for path in sorted((tmp_path / "pack").glob("*.bin")):
        flip(path, path.stat().st_size // 2)
        damaged = [verify(tmp_path / "pack", part=part).passed for part in parts]
        expected = 3 if path.name == "index.bin" else 1
        assert damaged.count(False) == expected, path.name
        flip(path, path.stat().st_size // 2)


def test_parts_restore_each_shard_once(tmp_path: Path) -> None:
    pack(tmp_path / "pack")
    for number in range(1, PARTS + 1):
        restore(tmp_path / "pack", tmp_path / "shards", part=(number, PARTS))
    for shard in shards_of(MODEL):
        assert (tmp_path / "shards" / Path(shard).name).read_bytes() == Path(shard).read_bytes()
    with pytest.raises(RequestError, match="by one process"):
        restore(tmp_path / "pack", in_place=True, part="1/2", target=tmp_path / "in place")
