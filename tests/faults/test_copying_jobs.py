"""Everything that copies a model, cut off at its writes, and on drives that say all is well.

There a write goes elsewhere or nowhere, a read brings another block: once, at the first, a middle
and the last write or read of each file. Nothing wrong is called right, and the same command comes
to its end once it can.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import moepack
from moepack.common.errors import MoepackError
from moepack.packing.copies import packed_items, subset_copy
from moepack.packing.pack_model import pack_in_place, pack_model
from moepack.packing.restore import restore
from tests.support import gguf_builder
from tests.support.damages import change_a_byte, change_padding
from tests.support.interruptions import CrashError, crash_after
from tests.support.models import flip, hotness_of, tree
from tests.support.pulls import check_part, copy_pack, store_of_packs

pytestmark = pytest.mark.long

FAULTS = ("a write elsewhere", "a write nowhere", "another block")


class Sound(NamedTuple):
    """A model in shards, its pack, and the address of that in a store."""

    shards: Path
    pack: Path
    address: str


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sound]:
    folder = tmp_path_factory.mktemp("sound")
    model = gguf_builder.moe((0, 1), 2, ne=(160, 160))
    gguf_builder.write_shards(gguf_builder.split(model, 6), folder / "shards")
    pack_model(folder / "shards", folder / "pack")
    (folder / "store").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        copy_pack(folder / "pack", folder / "store")
        with store_of_packs(folder / "store", patch) as server:
            yield Sound(folder / "shards", folder / "pack", f"{server.url}/a.moepack")


class Job(NamedTuple):
    """A command, which is told whether it runs again; and whether all is there, and as it was.

    What it leaves when it is cut off `is_right` as far as it goes, or says that it is not.
    """

    run: Callable[[bool], object]
    is_done: Callable[[], bool]
    is_right: Callable[[], bool] = lambda: True


def _pack(sound: Sound, folder: Path) -> Job:
    target = folder / "pack"
    return Job(
        lambda again: pack_model(sound.shards, target, resume=again, threads=1),
        lambda: (
            tree(target) == tree(sound.pack)
            or not moepack.verify(target, sound.shards).passed  # it was read once alone
        ),
    )


def _pack_in_place(sound: Sound, folder: Path) -> Job:
    source, target = Path(shutil.copytree(sound.shards, folder / "shards")), folder / "pack"

    def run(again: bool) -> None:
        has_begun = target.exists()
        pack_in_place(None if has_begun else source, target, resume=has_begun, threads=1)

    return Job(run, lambda: tree(target) == tree(sound.pack))


def _restore(sound: Sound, folder: Path) -> Job:
    pack, target = Path(shutil.copytree(sound.pack, folder / "pack")), folder / "shards"
    return Job(
        lambda again: restore(pack, target, threads=1, force=again),
        lambda: tree(target) == tree(sound.shards),
    )


def _mirror(
    sound: Sound, folder: Path, hottest: str | None = None, before: str | None = None
) -> Job:
    """Make a mirror of all experts, or the hottest; one of `before` is there already."""
    pack, second = Path(shutil.copytree(sound.pack, folder / "pack")), folder / "second"
    second.mkdir()
    if before is not None:
        moepack.mirror_pack(pack, second, hottest=before)

    def is_right() -> bool:
        with moepack.open(pack) as opened:
            is_whole = opened.mirror is None or opened.mirror.problem is None
        return is_whole and not moepack.verify(pack).findings

    def is_done() -> bool:
        with moepack.open(pack) as opened:
            assert opened.mirror is not None
            assert opened.mirror.record is not None
            length = sum(opened.locate(*key).length for key in opened.hottest(hottest or "100%"))
            return opened.mirror.record.length == length and not moepack.verify(pack).findings

    return Job(lambda again: moepack.mirror_pack(pack, second, hottest=hottest), is_done, is_right)


def _remove_mirror(sound: Sound, folder: Path) -> Job:
    _mirror(sound, folder, before="100%")
    pack = folder / "pack"

    def run(again: bool) -> None:
        if (pack / ".mirror").is_symlink():
            moepack.remove_mirror(pack)

    def is_done() -> bool:
        return tree(folder / "second") == {} and tree(pack) == tree(sound.pack)

    return Job(run, is_done, lambda: not moepack.verify(pack).findings)


def _pull(sound: Sound, folder: Path, layers: str | None = None) -> Job:
    target = folder / "pack"

    def is_right() -> bool:
        with contextlib.suppress(MoepackError):
            if not (target / "manifest.json").exists():
                check_part(target, sound.pack)
        return True

    def is_done() -> bool:
        if layers is None:
            return tree(target) == tree(sound.pack)
        return check_part(target, sound.pack) == {(1, 0), (1, 1)}

    return Job(
        lambda again: moepack.pull(sound.address, target, layers=layers, threads=1),
        is_done,
        is_right,
    )


def _repair(sound: Sound, folder: Path) -> Job:
    pack = Path(shutil.copytree(sound.pack, folder / "pack"))
    for name in ("experts-00000.bin", "dense.bin"):
        flip(pack / name, 100)
    change_a_byte(pack / "index.bin")
    change_padding(pack / "dense.bin")
    return Job(
        lambda again: moepack.repair(pack, sound.pack, threads=1),
        lambda: tree(pack) == tree(sound.pack),
        lambda: bool(moepack.verify(pack).findings) or tree(pack) == tree(sound.pack),
    )


def _rank(sound: Sound, folder: Path) -> Job:
    """Rank it anew: the old ranking stays, or the new one is there, and nothing else is left."""
    pack, other = (Path(shutil.copytree(sound.pack, folder / name)) for name in ("pack", "other"))
    hotness = hotness_of({(0, 1): 3, (1, 0): 5})
    moepack.rank_pack(other, hotness)
    return Job(
        lambda again: moepack.rank_pack(pack, hotness),
        lambda: tree(pack) == tree(other),
        lambda: bool(moepack.verify(pack).passed),
    )


def _index(sound: Sound, folder: Path) -> Job:
    """Lay an index over the shards: there is none, or a whole one."""
    shards, target = Path(shutil.copytree(sound.shards, folder / "shards")), folder / "index"
    moepack.index_model(shards, folder / "other")

    def run(again: bool) -> None:
        if not (target / "manifest.json").exists():
            moepack.index_model(shards, target)

    def is_right() -> bool:
        if not (target / "manifest.json").exists():
            with pytest.raises(MoepackError):
                moepack.Pack(target)
            return True
        return tree(target) == tree(folder / "other")

    return Job(run, lambda: tree(target) == tree(folder / "other"), is_right)


JOBS: dict[str, Callable[[Sound, Path], Job]] = {
    "pack": _pack,
    "pack in place": _pack_in_place,
    "restore": _restore,
    "mirror": _mirror,
    "pull": _pull,
    "repair": _repair,
}
HALF = "50%"
CUT_OFF = {name: JOBS[name] for name in ("restore", "mirror", "pull", "repair")} | {
    "mirror more": partial(_mirror, before=HALF),
    "mirror less": partial(_mirror, before="100%", hottest=HALF),
    "remove a mirror": _remove_mirror,
    "pull a part": partial(_pull, layers="1"),
    "rank": _rank,
    "index": _index,
}


@contextlib.contextmanager
def drive(fault: str, number: int | None) -> Iterator[list[str]]:
    """Let one write or read go wrong; the list has the files of all of them."""
    files: list[str] = []
    pwrite, preadv = os.pwrite, os.preadv

    def is_it(descriptor: int, is_write: bool) -> bool:
        if is_write != ("write" in fault):
            return False
        files.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        return len(files) - 1 == number

    def write(descriptor: int, data: Any, offset: int) -> int:
        if not is_it(descriptor, True):
            return pwrite(descriptor, data, offset)
        return len(data) if "nowhere" in fault else pwrite(descriptor, data, offset + 4096)

    def read(descriptor: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        length = preadv(descriptor, buffers, offset, *flags)
        if is_it(descriptor, False):
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                view[:] = bytes(view[512:]) + bytes(view[:512])
        return length

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        patch.setattr(os, "preadv", read)
        yield files


def sample(files: Sequence[str]) -> list[int]:
    """Return the numbers of the first, a middle and the last of the calls on each file."""
    numbers = {name: [n for n, other in enumerate(files) if other == name] for name in files}
    return sorted({n for of in numbers.values() for n in (of[0], of[len(of) // 2], of[-1])})


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pair
        for pair in itertools.product(JOBS, FAULTS)
        if pair != ("pull", "another block")  # it reads from a network, with a test of its own
    ],
)
def test_nothing_wrong_is_called_right_and_the_next_run_mends_it(
    name: str, fault: str, sound: Sound, tmp_path: Path
) -> None:
    (tmp_path / "sound").mkdir()
    with drive(fault, None) as files:
        JOBS[name](sound, tmp_path / "sound").run(False)
    assert files
    for number in sample(files):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = JOBS[name](sound, folder)
        with drive(fault, number):
            try:
                job.run(False)
                has_failed = False
            except MoepackError:
                has_failed = True
        if has_failed:
            job.run(True)
        assert job.is_done(), f"{name}, {fault} {number}, of {files[number]}"
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", CUT_OFF)
def test_whatever_ends_it_leaves_nothing_wrong_and_the_next_run_goes_on(
    name: str, sound: Sound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off at calls that write, a write being half done."""
    monkeypatch.setattr(packed_items, "RUN_LENGTH", 50_000)
    monkeypatch.setattr(subset_copy, "_SYNC_LENGTH", 100_000)
    steps, has_crashed = 0, True
    while has_crashed:
        folder = tmp_path / str(steps)
        folder.mkdir()
        job = CUT_OFF[name](sound, folder)
        with monkeypatch.context() as patch:
            crashed = crash_after(patch, steps)
            with contextlib.suppress(CrashError):
                job.run(False)
            has_crashed = crashed()
        assert job.is_right(), f"{name} {steps}"
        job.run(True)
        assert job.is_done(), f"{name} {steps}"
        shutil.rmtree(folder)
        steps += 1 if steps < 8 else 9
    assert steps > 8
