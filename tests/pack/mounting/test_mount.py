"""Packs mounted by the command: their files, the end of a mount, refusals."""

import errno
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import moepack
from tests.support import llama_cpp
from tests.support.children import PATIENCE, run_command
from tests.support.models import first_shard, pack_model, shards_of
from tests.support.mounts import mounted, needs_fuse, start
from tests.support.needs import needs_llama
from tests.support.warm_command import Run

pytestmark = pytest.mark.long

TOKENS = [(37 * n + 11) % 200 + 3 for n in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make an empty folder to mount at, with a name that shells would take apart."""
    made = tmp_path / "a folder"
    made.mkdir()
    return made


@pytest.fixture(params=["hot-first", "index"])
def pack_of_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Pack or index deepseek2, which has experts from layer 2 on."""
    source, target = first_shard("deepseek2"), tmp_path / "pack"
    counts = {(layer, expert): (expert * 5) % 7 for layer in (2, 3) for expert in range(16)}
    if request.param == "index":
        moepack.index_model(source, target)
    else:
        pack_model([source], target, request.param, counts=counts)
    return target


@needs_fuse
@needs_llama
def test_all_shards_are_there_bit_for_bit(pack_of_kind: Path, folder: Path) -> None:
    """And llama.cpp computes the same from them."""
    paths = [Path(path) for path in shards_of("deepseek2")]
    with mounted(pack_of_kind, folder):
        assert sorted(os.listdir(folder)) == [path.name for path in paths]
        for path in paths:
            assert (folder / path.name).read_bytes() == path.read_bytes()
        logits = llama_cpp.logits(folder / paths[0].name, TOKENS)
    assert np.array_equal(logits, llama_cpp.logits(paths[0], TOKENS))


@needs_fuse
def test_files_look_like_files_that_nobody_may_write(packs: dict[str, Path], folder: Path) -> None:
    path = first_shard("mixtral")
    with mounted(packs["mixtral"], folder):
        shown, made = os.stat(folder / path.name), os.stat(packs["mixtral"] / "manifest.json")
        assert shown.st_size == path.stat().st_size
        assert shown.st_blocks == -(-shown.st_size // 512)
        assert shown.st_mtime_ns == made.st_mtime_ns
        assert (shown.st_mode, shown.st_nlink) == (0o100444, 1)
        assert os.stat(folder).st_mode == 0o040555
        for flags, name in ((os.O_WRONLY, path.name), (os.O_CREAT | os.O_WRONLY, "new")):
            with pytest.raises(OSError, match="Read-only"):
                os.open(folder / name, flags)
        with pytest.raises(FileNotFoundError):
            os.stat(folder / "other.gguf")
    assert os.listdir(folder) == []


@needs_fuse
def test_many_readers_get_their_ranges_at_once(packs: dict[str, Path], folder: Path) -> None:
    path = Path(shards_of("qwen3moe")[2])
    data = path.read_bytes()
    dice = random.Random(3)
    ranges = [(dice.randrange(len(data)), dice.choice((1, 5000, 200_000))) for _ in range(400)]
    with (
        mounted(packs["qwen3moe"], folder),
        open(folder / path.name, "rb", buffering=0) as file,
        ThreadPoolExecutor(8) as pool,
    ):
        pieces = list(pool.map(lambda r: os.pread(file.fileno(), r[1], r[0]), ranges))
    assert pieces == [data[offset : offset + length] for offset, length in ranges]


@needs_fuse
def test_what_cannot_be_read_is_an_error_and_never_zeros(pack_copy: Path, folder: Path) -> None:
    """The file of layer 1 is cut while it is mounted: all of layer 0 can be read as before."""
    damaged = pack_copy / "experts-00001.bin"
    with mounted(pack_copy, folder) as process:
        os.truncate(damaged, 4096)
        counts = [sum(read_pages(path, folder) for path in shards_of("qwen3moe")) for _ in range(2)]
        process.terminate()
        lines = process.communicate()[1].splitlines()
    assert min(counts) > 16 * 3
    assert all(line.startswith(f"error: {damaged}: layer 1 expert ") for line in lines)
    assert all(line.endswith("the file became shorter") for line in lines)
    assert 16 * 3 - 1 <= len(lines) == len(set(lines)) <= 16 * 3  # a part each, however often


def read_pages(path: str, folder: Path) -> int:
    """Count the pages of a mounted shard that cannot be read; all others must be right."""
    data, error_count = Path(path).read_bytes(), 0
    with open(folder / Path(path).name, "rb", buffering=0) as file:
        for offset in range(0, len(data), 4096):
            try:
                page = os.pread(file.fileno(), 4096, offset)
            except OSError as error:
                error_count += error.errno == errno.EIO
            else:
                assert page == data[offset : offset + 4096]
    return error_count


@needs_fuse
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGHUP, "unmounted"])
def test_it_ends_well_and_leaves_nothing(
    end: signal.Signals | str, packs: dict[str, Path], folder: Path
) -> None:
    with mounted(packs["qwen3moe"], folder) as process:
        command = process.stdout.readline().partition("or: ")[2]
        assert os.path.ismount(folder)
        if isinstance(end, signal.Signals):
            process.send_signal(end)
        else:
            subprocess.run(command, shell=True, check=True)
        assert process.communicate(timeout=PATIENCE) == (f"{folder}: unmounted\n", "")
        assert not os.path.ismount(folder)


@needs_fuse
def test_a_signal_that_is_ignored_ends_nothing(packs: dict[str, Path], folder: Path) -> None:
    """As under nohup, and in the background of a shell without job control."""
    numbers = [signal.SIGINT, signal.SIGHUP]
    with mounted(packs["qwen3moe"], folder, ignored=numbers) as process:
        for number in numbers:
            process.send_signal(number)
        # What is read later than the signal came is read from a mount that outlived it.
        assert read_pages(shards_of("qwen3moe")[2], folder) == 0
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.terminate()
        assert process.communicate(timeout=PATIENCE)[1] == ""


@needs_fuse
def test_what_is_mounted_is_not_mounted_over(packs: dict[str, Path], folder: Path) -> None:
    with mounted(packs["qwen3moe"], folder), start(packs["mixtral"], folder) as second:
        errors = second.communicate(timeout=PATIENCE)[1]
        assert second.returncode == 2
        assert errors.splitlines() == [
            f"error: {folder}: something is mounted here already",
            f"hint: fusermount3 -u '{folder}'",
        ]


@needs_fuse
def test_a_mount_whose_server_was_killed_is_told_with_what_unmounts_it(
    packs: dict[str, Path], folder: Path
) -> None:
    with start(packs["qwen3moe"], folder) as killed:
        killed.stdout.readline()
        killed.kill()
    with start(packs["qwen3moe"], folder) as second:
        error, hint = second.communicate(timeout=PATIENCE)[1].splitlines()
    subprocess.run(hint.removeprefix("hint: "), shell=True, check=True)
    assert error.endswith("the mount here was killed and not unmounted")
    assert os.listdir(folder) == []


@needs_fuse
def test_what_the_caller_raises_ends_the_mount(packs: dict[str, Path], folder: Path) -> None:
    code = "import sys, moepack; moepack.mount(*sys.argv[1:], started=lambda facts: 1 / 0)"
    run = run_command(sys.executable, "-c", code, packs["qwen3moe"], folder)
    assert (run.returncode, "ZeroDivisionError" in run.stderr) == (1, True)
    assert not os.path.ismount(folder)


@needs_fuse
@pytest.mark.parametrize(
    ("at", "word"),
    [
        ("none", "no such folder to mount at"),
        ("file", "not a folder to mount at"),
        ("full", "the folder to mount at is not empty, expected an empty folder, found 1 name"),
    ],
)
def test_a_folder_that_will_not_do_is_refused(
    at: str, word: str, packs: dict[str, Path], tmp_path: Path, cli: Run
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full" / "entry").mkdir(parents=True)
    run = cli("mount", packs["qwen3moe"], tmp_path / at)
    assert run.returncode == 2
    assert run.stderr.splitlines()[0] == f"error: {tmp_path / at}: {word}"


@needs_fuse
def test_what_is_not_whole_is_refused(
    pack_copy: Path, tmp_path: Path, folder: Path, cli: Run
) -> None:
    pack_model([first_shard("qwen3moe")], tmp_path / "experts", experts_only=True)
    run = cli("mount", tmp_path / "experts", folder)
    assert (run.returncode, "not a whole pack" in run.stderr) == (4, True)
    os.truncate(pack_copy / "dense.bin", 4096)
    run = cli("mount", pack_copy, folder)
    assert (run.returncode, "dense.bin: the file is cut short" in run.stderr) == (4, True)
    assert not os.path.ismount(folder)


@pytest.mark.parametrize(
    ("lack", "problem", "command"),
    [
        ("ModuleNotFoundError", "mounting needs mfusepy", "[mount]"),
        ("OSError", "mounting needs libfuse", "apt-get install fuse3"),
    ],
)
def test_what_is_not_installed_is_named_with_what_installs_it(
    lack: str,
    problem: str,
    command: str,
    packs: dict[str, Path],
    tmp_path: Path,
    folder: Path,
    cli: Run,
) -> None:
    """A module in front of mfusepy raises the error of Python, or of mfusepy without libfuse."""
    (tmp_path / "mfusepy.py").write_text(f"raise {lack}")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    run = cli("mount", packs["qwen3moe"], folder, env=environment)
    assert run.returncode == 6
    error, hint = run.stderr.splitlines()
    assert problem in error
    assert command in hint
