"""Copying extents into new files, against a plain model: the bytes that each file has to have."""

import errno
import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.common import digest
from moepack.common.errors import MachineError, PackError
from moepack.storage import extents as extents_module
from moepack.storage import inputs
from moepack.storage.copying import Copier
from moepack.storage.extents import Extent, FinishedFile, NewFile, digests_of, is_whole
from moepack.storage.inputs import Inputs

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
            extents.append(Extent(*place, digest.xxh3(data), f"extent {len(extents)}"))
            body += data
        body += bytes(number * 5)
        files.append(NewFile(f"file {number}", len(body), lambda extents=extents: extents))  # type: ignore[misc]
        expected.append(bytes(body))
    return Work(inputs, files, expected)


def write_inputs(work: Work, folder: Path) -> list[Path]:
    """Write the inputs."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"input {number}" for number in range(len(work.inputs))]
    for path, data in zip(paths, work.inputs, strict=True):
        path.write_bytes(data)
    return paths


def copy(
    work: Work, folder: Path, *, threads: int = 3, resume: bool = False, by_input: bool = False
) -> tuple[Copier, dict[str, FinishedFile]]:
    """Write the files of `work` into `folder`."""
    folder.mkdir(exist_ok=True)
    written: dict[str, FinishedFile] = {}
    with Inputs(write_inputs(work, folder.parent / "inputs"), PackError) as inputs:
        copier = Copier(folder, inputs, lambda _: None, resume=resume, by_input=by_input)
        copier.write(work.files, threads, lambda file: written.update({file.name: file}))
    return copier, written


def check(work: Work, folder: Path, written: dict[str, FinishedFile]) -> None:
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


@settings(max_examples=40, deadline=None)
@given(
    plan=plans,
    run_length=st.integers(1, 30_000),
    threads=st.integers(1, 5),
    seed=st.integers(),
    by_input=st.booleans(),
)
def test_files_are_the_models_however_they_are_cut(
    plan: list[list[tuple[int, int, int, int]]],
    run_length: int,
    threads: int,
    seed: int,
    by_input: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    chance = random.Random(seed)
    work = work_of([chance.randbytes(40_000), bytes(20_000) + chance.randbytes(9000)], plan)
    folder = tmp_path_factory.mktemp("copy") / "new"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moepack.storage.copying.BUFFER_LENGTH", 1000)
        patch.setattr(inputs, "RANGE_LENGTH", run_length)
        patch.setattr(inputs, "MAX_GAP", run_length // 10)
        patch.setattr(extents_module.runs, "__defaults__", (run_length,))
        _, written = copy(work, folder, threads=threads, by_input=by_input)
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
        incomplete = {
            f.name for f in work.files if not is_whole(folder / f.name, f, lambda _: None)
        }
        assert incomplete == wrong
        copier, written = copy(work, folder, threads=threads, resume=True, by_input=by_input)
        check(work, folder, written)
        assert (copier.kept_length == sum(map(len, work.expected))) >= (not wrong)


def large_work() -> Work:
    """Plan one file of 40 MiB: several runs, so that threads share it."""
    data = random.Random(3).randbytes(MIB)
    plan = [(n % 3 * 100, 0, n * 1000, MIB // 2) for n in range(80)]
    return work_of([data], [plan])


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


def test_what_has_no_digest_is_written_anew(tmp_path: Path) -> None:
    work = work_of([b"abc" * 100], [[(0, 0, 0, 300)]])
    blind = [extent._replace(digest=None) for extent in work.files[0].extents()]
    file = work.files[0]._replace(extents=lambda: blind)
    copy(work, tmp_path / "new")
    assert not is_whole(tmp_path / "new" / "file 0", file, lambda _: None)
    copier, written = copy(work._replace(files=[file]), tmp_path / "new", resume=True)
    assert copier.kept_length == 0
    check(work, tmp_path / "new", written)


def test_descriptors_are_closed_whatever_happens(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    work = large_work()
    wrong = [extent._replace(digest=1) for extent in work.files[0].extents()]
    files = [work.files[0]._replace(extents=lambda: wrong)]
    with pytest.raises(PackError):
        copy(work._replace(files=files), tmp_path / "new")
    missing = Inputs([tmp_path / "inputs" / "input 0", "no"], PackError)
    with pytest.raises(PackError, match="missing"), missing:
        pass
    assert len(os.listdir("/proc/self/fd")) == before


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

    monkeypatch.setattr(os, "pread", fail)
    for code in (errno.EIO, errno.ENOMEM):
        with Inputs([tmp_path / "input"], PackError) as inputs:
            with pytest.raises(MachineError, match=os.strerror(code)) as raised:
                inputs.read(0, 1, 2)
            assert (raised.value.path, raised.value.place) == (str(tmp_path / "input"), "byte 1")
