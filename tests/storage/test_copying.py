"""Copying extents into new files, against a plain model: the bytes that each file has to have."""

import errno
import itertools
import os
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack import digest
from moepack.errors import MachineError, PackError, SourceError
from moepack.storage import extents as extents_module
from moepack.storage.copying import Copier, WrittenFile
from moepack.storage.extents import Extent, NewFile, runs
from moepack.storage.inputs import InputFile, Inputs
from moepack.storage.regular_file import FileStamp
from moepack.storage.stored_extents import digests_of, is_whole
from tests.support.children import PATIENCE

MIB = 1 << 20


class Work(NamedTuple):
    """Inputs, files to be made of them, and the bytes that these have to have."""

    inputs: list[bytes]
    files: list[NewFile]
    expected: list[bytes]


def work_of(inputs: list[bytes], plans: list[list[tuple[int, int, int, int]]]) -> Work:
    """Plan files of (gap before, input, offset there, length); the model is bytes put together."""
    files, expected = [], []
    for number, plan in enumerate(plans):
        extents: list[Extent] = []
        body = bytearray()
        for gap, which, start, length in plan:
            data = inputs[which][start : start + length]
            body += bytes(gap)
            place = (len(body), len(data), which, start)
            extents.append(Extent(*place, digest.of(data), f"extent {len(extents)}"))
            body += data
        body += bytes(number * 5)
        files.append(NewFile(f"file {number}", len(body), lambda extents=extents: extents))  # type: ignore[misc]
        expected.append(bytes(body))
    return Work(inputs, files, expected)


def write_inputs(work: Work, folder: Path) -> list[InputFile]:
    """Write the inputs."""
    folder.mkdir(exist_ok=True)
    for number, data in enumerate(work.inputs):
        (folder / f"input {number}").write_bytes(data)
    return [InputFile(str(folder / f"input {number}")) for number in range(len(work.inputs))]


def copy(
    work: Work, folder: Path, *, threads: int = 3, resume: bool = False
) -> tuple[Copier, dict[str, WrittenFile]]:
    """Write the files of `work` into `folder`."""
    written: dict[str, WrittenFile] = {}
    with Inputs(write_inputs(work, folder.parent / "inputs"), PackError) as inputs:
        copier = Copier(folder, inputs, lambda _: None, resume=resume)
        copier.write(work.files, threads, lambda file: written.update({file.name: file}))
    return copier, written


def check(work: Work, folder: Path, written: dict[str, WrittenFile]) -> None:
    """See that all files are the model's, and their digests those of their extents."""
    for file, expected in zip(work.files, work.expected, strict=True):
        assert (folder / file.name).read_bytes() == expected
        digests = [extent.digest for extent in file.extents()]
        assert list(written[file.name].digests) == digests
        assert list(digests_of(folder / file.name, file.extents())) == digests


plans = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 3000), st.integers(0, 1), st.integers(0, 40_000), st.integers(0, 9000)
        ),
        max_size=12,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(plan=plans, run_length=st.integers(1, 30_000), threads=st.integers(1, 5), seed=st.integers())
def test_files_are_the_models_however_they_are_cut(
    plan: list[list[tuple[int, int, int, int]]],
    run_length: int,
    threads: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    chance = random.Random(seed)
    work = work_of([chance.randbytes(40_000), bytes(20_000) + chance.randbytes(9000)], plan)
    folder = tmp_path_factory.mktemp("copy") / "new"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moepack.storage.copying.BUFFER_LENGTH", 1000)
        patch.setattr(extents_module.runs, "__defaults__", (run_length,))
        _, written = copy(work, folder, threads=threads)
        check(work, folder, written)
        damaged = [chance.randrange(3) for _ in work.files]
        for file, kind, expected in zip(work.files, damaged, work.expected, strict=True):
            path = folder / file.name
            if kind == 1 and expected:
                data = bytearray(expected)
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                path.write_bytes(data)
            elif kind == 2:
                path.write_bytes(expected[: chance.randrange(len(expected) + 1)] + b"more")
        wrong = {
            file.name
            for file, expected in zip(work.files, work.expected, strict=True)
            if (folder / file.name).read_bytes() != expected
        }
        found = {f.name for f in work.files if not is_whole(folder / f.name, f, lambda _: None)}
        assert found == wrong
        copier, written = copy(work, folder, threads=threads, resume=True)
        check(work, folder, written)
        assert (copier.kept_length == sum(map(len, work.expected))) >= (not wrong)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), max_size=30),
    tail=st.integers(0, 300),
    run_length=st.integers(1, 300),
)
def test_runs_cover_a_file_once_and_cut_no_extent(
    lengths: list[tuple[int, int]], tail: int, run_length: int
) -> None:
    extents, end = [], 0
    for gap, length in lengths:
        extents.append(Extent(end + gap, length, 0, 0))
        end += gap + length
    cut = list(runs(NewFile("file", end + tail, lambda: extents), run_length))
    assert [extent for run in cut for extent in run.extents] == extents
    assert [run.first for run in cut] == [
        sum(len(run.extents) for run in cut[:number]) for number in range(len(cut))
    ]
    assert [run.is_last for run in cut] == [False] * (len(cut) - 1) + [True]
    assert cut[0].start == 0
    assert cut[-1].end == end + tail
    for before, after in itertools.pairwise(cut):
        assert before.end == after.start
    for run in cut[:-1]:
        assert all(run.start <= e.offset and e.end <= run.end for e in run.extents)
        assert len(run.extents) == 1 or run.extents[-1].end - run.start <= run_length


def large_work(extent_count: int = 80) -> Work:
    """Plan one file of 40 MiB: several runs, so that threads share it."""
    data = random.Random(3).randbytes(MIB)
    plan = [(n % 3 * 100, 0, n * 1000, MIB // 2) for n in range(extent_count)]
    return work_of([data], [plan])


def test_one_file_is_written_by_several_threads_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=PATIENCE)
    waited: set[int] = set()

    def meet(self: Inputs, *arguments: object) -> int:
        if threading.get_ident() not in waited and len(waited) < 2:
            waited.add(threading.get_ident())
            both.wait()
        return read_into(self, *arguments)  # type: ignore[arg-type]

    read_into = Inputs.read_into
    monkeypatch.setattr(Inputs, "read_into", meet)
    work = large_work()
    (tmp_path / "new").mkdir()
    _, written = copy(work, tmp_path / "new", threads=2)
    check(work, tmp_path / "new", written)
    assert len(waited) == 2


def test_extents_without_bytes_stand_at_the_end_and_between(tmp_path: Path) -> None:
    work = work_of([b"abc" * 100], [[(0, 0, 0, 0), (4, 0, 0, 9), (0, 0, 7, 0), (3, 0, 1, 0)], []])
    (tmp_path / "new").mkdir()
    _, written = copy(work, tmp_path / "new")
    check(work, tmp_path / "new", written)
    assert list(written["file 0"].digests).count(digest.of(b"")) == 3


def test_inputs_in_memory_follow_those_in_files(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(2 * MIB)
    (tmp_path / "input").write_bytes(b"from a file")
    file = NewFile(
        "new", 11 + len(data), lambda: [Extent(0, 11, 0, 0), Extent(11, len(data), 1, 0)]
    )
    with Inputs([InputFile(str(tmp_path / "input"))], PackError, (data,)) as inputs:
        Copier(tmp_path, inputs, lambda _: None, clone=True).write([file], 2, lambda _: None)
        assert inputs.read(1, 5, 100) == data[5:105]
    assert (tmp_path / "new").read_bytes() == b"from a file" + data


def test_an_extent_that_is_not_what_it_should_be_ends_all(tmp_path: Path) -> None:
    work = large_work()
    wrong = [*work.files[0].extents()]
    wrong[50] = wrong[50]._replace(digest=7, label="layer 3 expert 1 up")
    (tmp_path / "new").mkdir()
    file = work.files[0]._replace(extents=lambda: wrong)
    with pytest.raises(PackError, match="the bytes do not have the digest") as raised:
        copy(work._replace(files=[file]), tmp_path / "new")
    assert raised.value.place == f"layer 3 expert 1 up at byte {wrong[50].input_offset:,}"
    assert raised.value.expected == "xxh3:0000000000000007"


def test_a_file_that_stands_there_is_not_written_over(tmp_path: Path) -> None:
    work = work_of([b"abc"], [[(0, 0, 0, 3)]])
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file 0").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        copy(work, tmp_path / "new")
    (tmp_path / "new" / "file 0").unlink()
    (tmp_path / "new" / "file 0").symlink_to(tmp_path / "elsewhere")
    for resume in (False, True):
        with pytest.raises(OSError, match=r"File exists|symbolic links"):
            copy(work, tmp_path / "new", resume=resume)
    assert not (tmp_path / "elsewhere").exists()


def test_zeros_that_were_overwritten_are_mended(tmp_path: Path) -> None:
    work = work_of([b"abc" * 1000], [[(500, 0, 0, 300), (700, 0, 3, 300)], [(9, 0, 0, 1)]])
    (tmp_path / "new").mkdir()
    copy(work, tmp_path / "new")
    places = [0, 499, 801, 1499, len(work.expected[1]) - 1]
    for file, place in zip((0, 0, 0, 0, 1), places, strict=True):
        data = bytearray(work.expected[file])
        data[place] = 1
        (tmp_path / "new" / f"file {file}").write_bytes(data)
        copier, written = copy(work, tmp_path / "new", resume=True)
        check(work, tmp_path / "new", written)
        assert copier.kept_length == len(work.expected[1 - file])


def test_what_has_no_digest_is_written_anew(tmp_path: Path) -> None:
    work = work_of([b"abc" * 100], [[(0, 0, 0, 300)]])
    blind = [extent._replace(digest=None) for extent in work.files[0].extents()]
    file = work.files[0]._replace(extents=lambda: blind)
    (tmp_path / "new").mkdir()
    copy(work, tmp_path / "new")
    assert not is_whole(tmp_path / "new" / "file 0", file, lambda _: None)
    copier, written = copy(work._replace(files=[file]), tmp_path / "new", resume=True)
    assert copier.kept_length == 0
    check(work, tmp_path / "new", written)


@pytest.mark.parametrize("change", ["cut", "replaced", "touched", "removed"])
def test_an_input_that_changes_meanwhile_is_its_own_fault(change: str, tmp_path: Path) -> None:
    work = large_work()
    (path,) = (Path(file.path) for file in write_inputs(work, tmp_path))
    stamp = FileStamp.of(path.stat())

    def disturb(_: int) -> None:
        if change == "cut":
            os.truncate(path, 10)
        elif change == "touched":
            os.utime(path, (1, 1))
        else:
            path.unlink(missing_ok=True)
        if change == "replaced":
            path.write_bytes(work.inputs[0])

    def run() -> None:
        with Inputs([InputFile(str(path), stamp)], SourceError) as inputs:
            Copier(tmp_path, inputs, disturb).write(work.files, 2, lambda _: None)
            inputs.check_unchanged()

    with pytest.raises(SourceError, match="changed while|became shorter") as raised:
        run()
    assert raised.value.path == str(path)


def test_an_input_that_changed_before_is_refused_at_opening(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"abc")
    stamp = FileStamp.of((tmp_path / "input").stat())
    (tmp_path / "input").write_bytes(b"abcd")
    inputs = Inputs([InputFile(str(tmp_path / "input"), stamp)], SourceError)
    with pytest.raises(SourceError, match="changed"), inputs:
        pass


def test_descriptors_are_closed_whatever_happens(tmp_path: Path) -> None:
    held = len(os.listdir("/proc/self/fd"))
    work = large_work()
    wrong = [extent._replace(digest=1) for extent in work.files[0].extents()]
    (tmp_path / "new").mkdir()
    files = [work.files[0]._replace(extents=lambda: wrong)]
    with pytest.raises(PackError):
        copy(work._replace(files=files), tmp_path / "new")
    missing = Inputs([InputFile(str(tmp_path / "inputs" / "input 0")), InputFile("no")], PackError)
    with pytest.raises(PackError, match="missing"), missing:
        pass
    assert len(os.listdir("/proc/self/fd")) == held


def test_a_file_system_that_is_full_ends_the_copy(tmp_path: Path) -> None:
    text = """
import resource, sys
from pathlib import Path
from tests.storage.test_copying import copy, large_work
resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 20, 9 << 20))
try:
    copy(large_work(), Path(sys.argv[1]), threads=1)
except OSError as error:
    sys.exit(error.errno)
"""
    (tmp_path / "new").mkdir()
    run = subprocess.run([sys.executable, "-c", text, tmp_path / "new"], check=False)
    assert run.returncode == errno.EFBIG
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    copier, written = copy(large_work(), tmp_path / "new", resume=True)
    assert copier.kept_length > 0
    check(large_work(), tmp_path / "new", written)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_file_that_cannot_be_synced_is_not_finished(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    (tmp_path / "new").mkdir()
    finished: list[str] = []
    work = work_of([b"abc"], [[(0, 0, 0, 3)], [(0, 0, 0, 3)]])
    with Inputs(write_inputs(work, tmp_path / "inputs"), PackError) as inputs:
        copier = Copier(tmp_path / "new", inputs, lambda _: None)
        with pytest.raises(OSError, match=os.strerror(code)):
            copier.write(work.files, 2, lambda file: finished.append(file.name))
    assert finished == []


def test_a_drive_that_fails_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input").write_bytes(b"abc")

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    for code, kind in ((errno.EIO, PackError), (errno.ENOMEM, MachineError)):
        with Inputs([InputFile(str(tmp_path / "input"))], PackError) as inputs:
            with pytest.raises(kind, match=os.strerror(code)) as raised:
                inputs.read(0, 1, 2)
            assert (raised.value.path, raised.value.place) == (str(tmp_path / "input"), "byte 1")
