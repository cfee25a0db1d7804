"""Nothing is lost: whatever happens to `moepack pack`, there is no pack or a whole one.

Each test lets something real happen to a real process, and then asks the same questions: is there
no pack, or a whole one; does `--resume` end at the very bytes of a pack that was never disturbed;
were finished files left alone; is the source as it was?
"""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import moepack
from moepack.errors import MachineError, PackError, RequestError
from moepack.verifying.verifier import verify
from tests.support import gguf_builder, machine_faults
from tests.support.amounts import amounts
from tests.support.children import PATIENCE
from tests.support.machine_faults import Disk, Room, Shot, needs_strace
from tests.support.models import contents, pack_model

Command = Callable[..., subprocess.CompletedProcess[str]]

MANIFEST = "manifest.json"
INDEX = "index.bin"
JOURNAL = "pack.journal"
MIB = 1 << 20
EXT4_IOC_SHUTDOWN = 0x8004587D
"""Cuts a file system off its disk at once; ext4, XFS and others share the number."""
WITHOUT_FLUSH = struct.pack("I", 2)


class Model(NamedTuple):
    """A source, and what an undisturbed pack of it holds."""

    source: Path
    packed: dict[str, bytes]

    def __repr__(self) -> str:
        return f"Model({self.source})"

    @property
    def data_files(self) -> list[str]:
        """The names of its data files, in the order in which they are written: dense is last."""
        names = self.packed.keys() - {MANIFEST, INDEX}
        return sorted(names, key=lambda name: (name == "dense.bin", name))

    @property
    def length(self) -> int:
        """The bytes of a whole pack."""
        return sum(map(len, self.packed.values()))


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """Map each file's name to what changes when it is replaced or written to."""
    files = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in files.items()}


def length_on_disk(folder: Path) -> int:
    """Return the bytes of all files in `folder` at this moment; -1 where it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries)
    except FileNotFoundError:  # the folder, or a file that was just renamed
        return 0 if folder.exists() else -1


def journaled(target: Path) -> list[str]:
    """Name the files that the journal in `target` says are finished."""
    try:
        lines = (target / JOURNAL).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line)["name"] for line in lines[1:] if line.endswith(b"\n")]


def has_bytes(target: Path, length: int) -> Callable[[], bool]:
    """Return the question whether `length` bytes are in `target`."""
    return lambda: length_on_disk(target) >= length


def has_finished(target: Path, count: int) -> Callable[[], bool]:
    """Return the question whether `count` files are in the journal in `target`."""
    return lambda: len(journaled(target)) >= count


def make_model(folder: Path, layers: int, experts: int, ne: tuple[int, int], shards: int) -> Model:
    """Build a model of `layers` files, and pack it once undisturbed."""
    source = folder / "source"
    source.mkdir()
    built = gguf_builder.moe(tuple(range(layers)), experts, ne=ne)
    tensors_each = -(-len(built.tensors) // shards)
    gguf_builder.write_shards(gguf_builder.split(built, tensors_each), source)
    pack_model([source], folder / "packed")
    return Model(source, contents(folder / "packed"))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Build a model of 39 MiB, which takes long enough to be disturbed; see that it stays."""
    model = make_model(tmp_path_factory.mktemp("big"), 6, 16, (512, 256), shards=4)
    before = contents(model.source), identities(model.source)
    yield model
    assert (contents(model.source), identities(model.source)) == before


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Build a model of three small files."""
    return make_model(tmp_path_factory.mktemp("small"), 3, 2, (64, 32), shards=2)


@pytest.fixture
def room() -> Iterator[Room]:
    with Room() as opened:
        yield opened


class StopHereError(Exception):
    """Raised by a test's progress callback."""


def interrupt(model: Model, target: Path, finished_count: int, *, finished_before: int = 0) -> None:
    """Leave in `target` what an interruption leaves when `finished_count` files are finished.

    `finished_before` of them were so before another interruption.
    """
    names = model.data_files[finished_before:finished_count]
    left = sum(len(model.packed[name]) for name in names)

    def progress(length: int, _total: int) -> None:
        nonlocal left
        left -= length
        if left < 0:
            raise StopHereError

    with pytest.raises(StopHereError):
        pack_model([model.source], target, threads=1, progress=progress, resume=finished_before > 0)
    assert journaled(target) == model.data_files[:finished_count]


def is_whole(target: Path, model: Model) -> bool:
    """Say whether there is a pack; if so, it must be whole, and if not, nothing may open it."""
    if (target / MANIFEST).exists():
        held = contents(target)
        held.pop(JOURNAL, None)
        assert held == model.packed
        assert verify(target).passed
        return True
    with pytest.raises(PackError):
        moepack.open(target)
    with pytest.raises(PackError):
        verify(target)
    return False


def resume(model: Model, target: Path, finished: Sequence[str] | None = None) -> None:
    """Pack with `resume`: the result is as if nothing had happened, and `finished` was not redone.

    By default the files in the journal are the finished ones.
    """
    names = journaled(target) if finished is None else finished
    before = {name: identities(target)[name] for name in names}
    pack_model([model.source], target, resume=True)
    assert contents(target) == model.packed
    after = identities(target)
    assert {name: after[name] for name in names} == before


def says(errors: str, error: str, hint: str = "") -> bool:
    """Return whether standard error is `error: …`, then hints, in the words that are asked for."""
    lines = [line for line in errors.splitlines() if line]
    first, second = [*lines, "", ""][:2]
    return (
        all(line.startswith("hint: ") for line in lines[1:])
        and bool(re.match(f"error: .*{error}", first))
        and (not hint or bool(re.match(f"hint: .*{hint}", second)))
    )


# Signals


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_at_any_moment_it_leaves_no_pack_or_a_whole_one_and_resumes(
    number: signal.Signals, big: Model, tmp_path: Path, moepack_command: Command
) -> None:
    """Moments are shares of the bytes written, so that they do not depend on the machine's speed.

    Every other time, four files are written at once.
    """
    interrupted = 0
    for moment, share in enumerate((0.0, 0.25, 0.6, 0.95)):
        target = tmp_path / str(moment)
        threads = "4" if moment % 2 else "1"
        process = machine_faults.start(big.source, "-o", target, "--threads", threads)
        machine_faults.wait_until(has_bytes(target, int(share * big.length)), process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
        if target.exists() and is_whole(target, big):
            assert process.returncode in (0, 130, -number), errors
            continue
        interrupted += 1
        assert process.returncode == (-number if number == signal.SIGKILL else 130), errors
        if number != signal.SIGKILL:
            assert says(errors, "interrupted", "--resume" if journaled(target) else ""), errors
        finished = {name: identities(target)[name] for name in journaled(target)}
        outcome = moepack_command("pack", big.source, "-o", target, "--resume", "--json")
        assert outcome.returncode == 0, outcome.stderr
        assert contents(target) == big.packed
        assert finished.items() <= identities(target).items()
        assert json.loads(outcome.stdout)["resumed_file_count"] == len(finished)
        shutil.rmtree(target)
    assert interrupted


def test_an_interrupted_pack_says_how_to_continue_and_that_it_is_none(
    big: Model, tmp_path: Path, moepack_command: Command
) -> None:
    target = tmp_path / "pack"
    with machine_faults.stopped(
        target, has_finished(target, 2), big.source, "--threads", "1"
    ) as process:
        process.send_signal(signal.SIGINT)
        code, errors = machine_faults.resumed(process)
    assert code == 130
    assert says(errors, "interrupted", "--resume")
    assert sorted(contents(target)) == sorted([*journaled(target), JOURNAL])
    outcome = moepack_command("verify", target)
    assert outcome.returncode == 4
    assert says(outcome.stderr, "not a whole pack", "--resume")
    resume(big, target)


class Scene:
    """A run of `moepack pack` that is disturbed at each of its calls on files in its target.

    The run is recorded once, undisturbed: from where two files are finished, or from the start. In
    the latter only what comes before the first data file is disturbed; the rest is the same.
    """

    def __init__(self, folder: Path, model: Model, *, resumed: bool) -> None:
        self.model = model
        self.before = folder / "before"
        self.finished = model.data_files[:2] if resumed else []
        self.arguments: list[str | Path] = [model.source, "--threads", "1"]
        self.arguments += ["--resume"] if resumed else []
        if resumed:
            interrupt(model, self.before, len(self.finished))
            # What a loss of power leaves of a file that was written and not synced.
            unsynced = model.data_files[len(self.finished)]
            (self.before / unsynced).write_bytes(bytes(len(model.packed[unsynced])))
        target = self.prepare(folder / "recorded")
        self.calls = machine_faults.record(target, *self.arguments)
        assert is_whole(target, model)
        first = next(n for n, call in enumerate(self.calls) if call.file in model.data_files)
        self.shots = machine_faults.shots(self.calls)[: None if resumed else first]
        assert len(self.shots) > 4

    def prepare(self, folder: Path) -> Path:
        """Return a target in which the run may start."""
        folder.mkdir()
        if self.finished:
            shutil.copytree(self.before, folder / "pack")
        return folder / "pack"

    def hit(
        self, shot: Shot, fault: str, folder: Path
    ) -> tuple[Path, subprocess.CompletedProcess[str]]:
        """Run with one fault; return the target and how it ended."""
        target = self.prepare(folder / str(shot.number))
        return target, machine_faults.hit(shot, fault, target, *self.arguments)

    def check_resumes(self, target: Path) -> None:
        """Continue what was disturbed, where it left no whole pack."""
        if target.exists() and is_whole(target, self.model):
            return
        target.mkdir(exist_ok=True)
        resume(self.model, target, self.finished)

    def hint_after(self, shot: Shot, target: Path) -> str:
        """Return the hint that is due: a packer that did not get at its journal knows of none."""
        locked = any(call.name == "flock" for call in self.calls[: shot.number])
        return "--resume" if locked and journaled(target) else ""


@pytest.fixture(scope="module")
def first_run(small: Model, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("first"), small, resumed=False)


@pytest.fixture(scope="module")
def resumed_run(small: Model, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("resumed"), small, resumed=True)


@pytest.fixture(params=["first_run", "resumed_run"])
def scene(request: pytest.FixtureRequest) -> Scene:
    chosen: Scene = request.getfixturevalue(request.param)
    return chosen


def in_pairs(work: Callable[[Shot], None], aimed: Sequence[Shot]) -> None:
    """Do `work` for each shot, two at a time: a machine of two cores is the least to expect."""
    with ThreadPoolExecutor(2) as executor:
        for _ in executor.map(work, aimed):
            pass


@needs_strace()
def test_killed_before_any_call_and_robbed_of_what_was_not_synced_it_resumes(
    scene: Scene, tmp_path: Path
) -> None:
    """A power cut at its worst, at each step: only what was synced before the cut is kept."""

    def kill(shot: Shot) -> None:
        disk = Disk(scene.before)
        for call in scene.calls[: shot.number]:
            disk.see(call)
        target, outcome = scene.hit(shot, "signal=SIGKILL", tmp_path)
        assert outcome.returncode == -signal.SIGKILL, shot
        disk.lose_power(target)
        scene.check_resumes(target)

    in_pairs(kill, scene.shots)


@needs_strace()
@pytest.mark.parametrize("step", amounts(2, 1))
def test_a_call_that_fails_once_leaves_no_pack_and_resumes(
    scene: Scene, tmp_path: Path, step: int
) -> None:
    """Every fsync in turn, and every other call as well, ends with an I/O error."""

    def fail(shot: Shot) -> None:
        target, outcome = scene.hit(shot, "error=EIO", tmp_path)
        assert outcome.returncode == 6, (shot, outcome)
        committed = any(call.name == "rename" for call in scene.calls[: shot.number])
        hint = "moepack verify" if committed else scene.hint_after(shot, target)
        error = "the pack is whole.*Input/output error" if committed else "Input/output error"
        assert says(outcome.stderr, error, hint), shot
        assert (target / MANIFEST).exists() == committed, shot
        if target.exists() and not scene.finished and shot.name != "flock":
            assert contents(target).keys() & set(scene.model.data_files), shot
        scene.check_resumes(target)

    in_pairs(fail, scene.shots[::step])


@needs_strace()
def test_interrupted_at_the_calls_of_a_resumed_pack_what_was_finished_stays(
    resumed_run: Scene, tmp_path: Path
) -> None:
    def interrupt_at(shot: Shot) -> None:
        target, outcome = resumed_run.hit(shot, "signal=SIGINT", tmp_path)
        assert outcome.returncode == 130, (shot, outcome)
        assert says(outcome.stderr, "interrupted", resumed_run.hint_after(shot, target)), shot
        resumed_run.check_resumes(target)

    in_pairs(interrupt_at, resumed_run.shots[::2])


@needs_strace()
def test_interrupted_while_the_journal_is_closed_it_closes_nothing_twice(
    small: Model, tmp_path: Path
) -> None:
    """The journal is closed when it has been removed, and Linux says so in its name."""
    target = tmp_path / "pack"
    shot = Shot("close", (JOURNAL, f"{JOURNAL} (deleted)"))
    outcome = machine_faults.hit(shot, "signal=SIGINT", target, small.source)
    assert outcome.returncode == 130, outcome.stderr
    assert says(outcome.stderr, "interrupted")
    assert is_whole(target, small)


@needs_strace()
def test_a_file_that_failed_to_sync_is_not_trusted_even_if_nobody_cleaned_up(
    small: Model, tmp_path: Path
) -> None:
    """The packer is killed when it begins to clean up; the file has its length, but no content."""
    target = tmp_path / "pack"
    name = small.data_files[1]
    outcome = machine_faults.hit(
        Shot("fsync", (name,)), "error=EIO", target, small.source, "--threads", "1",
        also=["inject=?unlink,unlinkat:signal=SIGKILL"],
    )  # fmt: skip
    assert outcome.returncode == -signal.SIGKILL
    assert small.data_files[0] in journaled(target)
    assert name not in journaled(target)
    (target / name).write_bytes(bytes(len(small.packed[name])))
    resume(small, target)


@needs_strace()
def test_a_finished_file_that_is_redone_is_not_trusted_before_it_is_synced_again(
    small: Model, tmp_path: Path
) -> None:
    """The journal still knows the file from its first life when the power fails in its second."""
    target = tmp_path / "pack"
    interrupt(small, target, 2)
    name = small.data_files[0]
    (target / name).unlink()
    outcome = machine_faults.hit(
        Shot("fsync", (name,)), "signal=SIGKILL", target, small.source, "--resume"
    )
    assert outcome.returncode == -signal.SIGKILL
    (target / name).write_bytes(bytes(len(small.packed[name])))
    resume(small, target, small.data_files[1:2])


@needs_strace()
def test_killed_again_and_again_each_resume_gets_further(small: Model, tmp_path: Path) -> None:
    """Each run dies when it syncs its first line of the journal, after the identity's."""
    target = tmp_path / "pack"
    finished: dict[str, tuple[int, int]] = {}
    for count, when in ((1, 2), (2, 1)):
        shot = Shot("fsync", (JOURNAL,), when)
        outcome = machine_faults.hit(
            shot, "signal=SIGKILL", target, small.source, "--threads", "1", "--resume"
        )
        assert outcome.returncode == -signal.SIGKILL
        assert journaled(target) == small.data_files[:count]
        assert finished.items() <= identities(target).items()
        finished = {name: identities(target)[name] for name in journaled(target)}
    resume(small, target)


# The order of events


@needs_strace()
@pytest.mark.parametrize("threads", ["1", "4"])
def test_nothing_is_promised_before_it_is_synced(
    threads: str, small: Model, tmp_path: Path
) -> None:
    target = tmp_path / "pack"
    calls = machine_faults.record(target, small.source, "--threads", threads)
    disk = Disk(target)
    promised: list[str] = []
    for call in calls:
        if call.file == JOURNAL and call.name == "pwrite64":
            names = re.findall(r"experts-\d+\.bin|dense\.bin", call.arguments)
            assert not disk.unsynced() & set(names)
            promised += names
        if call.name.startswith("rename"):
            assert machine_faults.renamed_to(call) == MANIFEST
            assert not disk.unsynced()
            assert {*small.data_files, INDEX, JOURNAL} <= disk.lengths.keys()
        disk.see(call)
    assert sorted(promised) == sorted(small.data_files)
    assert disk.lengths[MANIFEST] == len(small.packed[MANIFEST])


@needs_strace()
def test_names_are_synced_before_and_after_the_commit_and_the_journal_goes_last(
    small: Model, tmp_path: Path
) -> None:
    calls = machine_faults.record(tmp_path / "pack", small.source)
    steps = [(call.name.removesuffix("at"), call.file) for call in calls]
    commit = steps.index(("rename", f"{MANIFEST}.tmp"))
    created = max(n for n, call in enumerate(calls) if "O_CREAT" in call.arguments)
    synced = [n for n, step in enumerate(steps) if step == ("fsync", ".")]
    removed = steps.index(("unlink", JOURNAL))
    for name in small.data_files:
        written = next(
            n
            for n, call in enumerate(calls)
            if call.file == JOURNAL and call.name == "pwrite64" and name in call.arguments
        )
        assert any(steps.index(("open", name)) < n < written for n in synced)
    first = min(steps.index(("open", name)) for name in small.data_files)
    assert any(steps.index(("open", JOURNAL)) < n < first for n in synced)
    assert any(created < n < commit for n in synced)
    assert any(commit < n < removed for n in synced)
    assert removed == len(steps) - 1


@needs_strace()
def test_a_new_target_is_synced_into_its_parent(small: Model, tmp_path: Path) -> None:
    log = tmp_path / "log"
    traced = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", "trace=fsync"]
    command = [
        *traced,
        *machine_faults.PACK_COMMAND,
        str(small.source),
        "-o",
        str(tmp_path / "pack"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert f"<{tmp_path}>)" in log.read_text()


# Disks


@needs_strace()
@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT"])
def test_no_space_for_the_journal_says_so_and_resumes(
    error: str, small: Model, tmp_path: Path
) -> None:
    target = tmp_path / "pack"
    shot = Shot("pwrite64", (JOURNAL,), 3)
    outcome = machine_faults.hit(shot, f"error={error}", target, small.source, "--threads", "1")
    assert outcome.returncode == 6
    assert says(outcome.stderr, "no space left", "free some space.*--resume")
    resume(small, target, small.data_files[:1])


def test_a_full_disk_is_seen_before_anything_is_written(
    big: Model, room: Room, tmp_path: Path, moepack_command: Command
) -> None:
    disk = room.mount(tmp_path, "-t", "tmpfs", "-o", f"size={big.length - MIB}", "tmpfs")
    outcome = moepack_command("pack", big.source, "-o", disk / "pack")
    assert outcome.returncode == 6
    assert says(outcome.stderr, "not enough space.*expected.*found", "free some space")
    assert not (disk / "pack").exists()
    (disk / "pack").mkdir()
    assert moepack_command("pack", big.source, "-o", disk / "pack").returncode == 6
    assert contents(disk / "pack") == {}


def test_a_disk_that_fills_up_midway_leaves_what_resume_continues(
    big: Model, room: Room, tmp_path: Path, moepack_command: Command
) -> None:
    disk = room.mount(tmp_path, "-t", "tmpfs", "-o", f"size={big.length + MIB}", "tmpfs")
    target, filler = disk / "pack", disk / "filler"
    arguments = (big.source, "--threads", "1")
    with machine_faults.stopped(target, has_finished(target, 1), *arguments) as process:
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * 4096)
        code, errors = machine_faults.resumed(process)
    assert code == 6
    assert says(errors, "no space left", "free some space.*--resume")
    assert not is_whole(target, big)
    assert sorted(contents(target)) == sorted([*journaled(target), JOURNAL])
    filler.unlink()
    resume(big, target)


def test_a_resumed_pack_needs_space_only_for_what_is_missing(
    big: Model, room: Room, tmp_path: Path
) -> None:
    """A file that was cut short holds space which its new writing will use."""
    disk = room.mount(tmp_path, "-t", "tmpfs", "-o", f"size={big.length + MIB // 4}", "tmpfs")
    target = disk / "pack"
    whole_file = len(big.packed[big.data_files[0]])
    reached = has_bytes(target, whole_file * 3 // 2)
    with machine_faults.stopped(target, reached, big.source, "--threads", "1") as process:
        process.kill()
        process.communicate()
    resume(big, target)


def test_a_file_that_may_not_grow_is_an_error_of_the_machine(big: Model, tmp_path: Path) -> None:
    """The limit on a file's length needs no rights and cuts a write short, as a full disk does."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * MIB + 1, resource.RLIM_INFINITY))

    command = [*machine_faults.PACK_COMMAND, str(big.source), "-o", str(tmp_path / "pack")]
    outcome = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=limit, timeout=PATIENCE, check=False
    )
    assert outcome.returncode == 6
    assert says(outcome.stderr, ".", ".")
    assert not (tmp_path / "pack").exists()


@needs_strace()
def test_a_write_that_was_cut_short_is_continued(big: Model, tmp_path: Path) -> None:
    """The limit on a file's length cuts a write short, and is lifted before the next one."""
    target = tmp_path / "pack"
    first = target / big.data_files[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = MIB + 4321
    shot = Shot("pwrite64", (first.name,), 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with machine_faults.stopped_at(
            shot, lambda: first.exists() and first.stat().st_size == limit, target,
            big.source, "--threads", "1",
        ) as (packer, run_on):  # fmt: skip
            resource.prlimit(packer, resource.RLIMIT_FSIZE, (soft, hard))
            code, errors = run_on()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 0, errors
    assert is_whole(target, big)


def cut_power(mounted: Path) -> None:
    """Cut the file system off its disk, with nothing flushed before."""
    descriptor = os.open(mounted, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, WITHOUT_FLUSH)
    finally:
        os.close(descriptor)


@pytest.mark.skipif(not shutil.which("mkfs.ext4"), reason="mkfs.ext4 is not installed")
@pytest.mark.parametrize("moment", ["first file", "commit", "end"])
def test_after_a_power_cut_on_a_real_file_system_it_resumes(
    moment: str, big: Model, room: Room, tmp_path: Path
) -> None:
    """An ext4 is shut down as by a power cut and mounted again: what was not synced is gone.

    What was reported as packed must be there.
    """
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(3 * big.length)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mounted = room.mount(place, "-o", "loop", image)
    target = mounted / "pack"
    reached = {
        "first file": has_finished(target, 1),
        "commit": (target / MANIFEST).exists,
        "end": lambda: False,
    }[moment]
    process = machine_faults.start(big.source, "-o", target, "--threads", "1")
    machine_faults.wait_until(reached, process)
    cut_power(mounted)
    process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 6)
    assert room.run("umount", place)
    room.mount(place, "-o", "loop", image)
    if not is_whole(target, big):
        assert process.returncode == 6
        resume(big, target)


# Sources


def test_a_read_only_source_is_read_and_left_as_it_was(
    big: Model, room: Room, tmp_path: Path, moepack_command: Command
) -> None:
    """The source lies on a read-only mount, for root can write to everything else."""
    before = contents(big.source), identities(big.source)
    place = tmp_path / "source"
    place.mkdir()
    room.mount(place, "--bind", big.source)
    source = room.mount(place, "-o", "remount,bind,ro")
    with pytest.raises(OSError, match="Read-only file system"):
        (source / "proof").touch()
    outcome = moepack_command("pack", source, "-o", tmp_path / "pack")
    assert outcome.returncode == 0, outcome.stderr
    assert is_whole(tmp_path / "pack", big)
    assert (contents(big.source), identities(big.source)) == before
    outcome = moepack_command("pack", big.source, "-o", source / "pack")
    assert outcome.returncode == 6
    assert says(outcome.stderr, "Read-only file system")


def test_a_source_without_write_permission_is_read_and_left_as_it_was(
    small: Model, tmp_path: Path, moepack_command: Command
) -> None:
    source = Path(shutil.copytree(small.source, tmp_path / "source"))
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path == source else 0o444)
    before = contents(source), identities(source)
    outcome = moepack_command("pack", source, "-o", tmp_path / "pack")
    assert outcome.returncode == 0, outcome.stderr
    assert is_whole(tmp_path / "pack", small)
    assert (contents(source), identities(source)) == before
    source.chmod(0o755)


def change_a_byte(shard: Path, offset: int = -1) -> None:
    """Change one byte of tensor data; by default the last one."""
    with open(shard, "r+b") as file:
        file.seek(offset, os.SEEK_END)
        before = file.read(1)
        file.seek(offset, os.SEEK_END)
        file.write(bytes([before[0] ^ 1]))


def truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - MIB)


def rewrite_with_its_time(shard: Path) -> None:
    """Change a byte as `rsync --inplace --times` may: only the ctime tells."""
    status = shard.stat()
    change_a_byte(shard)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(shard: Path) -> None:
    other = shard.with_name("other")
    shutil.copy(shard, other)
    change_a_byte(other)
    other.rename(shard)


@pytest.mark.parametrize("shard", [0, 3])
@pytest.mark.parametrize("change", [change_a_byte, rewrite_with_its_time, truncate, replace])
def test_a_source_that_changes_while_it_is_read_makes_no_pack(
    change: Callable[[Path], None], shard: int, big: Model, tmp_path: Path
) -> None:
    """When the packer is stopped, it has read the first shard and not yet the last one."""
    source = Path(shutil.copytree(big.source, tmp_path / "source"))
    changed = sorted(source.iterdir())[shard]
    target = tmp_path / "pack"
    with machine_faults.stopped(
        target, has_finished(target, 2), source, "--threads", "1"
    ) as process:
        change(changed)
        code, errors = machine_faults.resumed(process)
    assert code == 3
    assert says(errors, changed.name)
    assert not is_whole(target, big)


def test_a_source_that_changed_before_the_resume_makes_no_pack(
    small: Model, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(small.source, tmp_path / "source"))
    target = tmp_path / "pack"
    interrupt(small._replace(source=source), target, 2)
    rewrite_with_its_time(sorted(source.iterdir())[0])
    with pytest.raises(RequestError, match="made from other input: not the same source"):
        pack_model([source], target, resume=True)
    assert not is_whole(target, small)


@needs_strace()
def test_a_source_that_cannot_be_read_is_named_and_resumed_when_it_can(
    small: Model, tmp_path: Path
) -> None:
    target = tmp_path / "pack"
    shard = sorted(small.source.iterdir())[-1]
    outcome = machine_faults.hit(
        Shot("preadv preadv2", (str(shard),)), "error=EIO", target, small.source, "--threads", "1"
    )
    assert outcome.returncode == 3
    assert says(outcome.stderr, f"{shard.name}.*Input/output error", "--resume")
    resume(small, target)


# Targets


def test_a_whole_pack_is_never_touched(
    small: Model, tmp_path: Path, moepack_command: Command
) -> None:
    target = tmp_path / "pack"
    pack_model([small.source], target)
    before = identities(target)
    for options in ([], ["--resume"], ["--layers", "0"]):
        outcome = moepack_command("pack", small.source, "-o", target, *options)
        assert outcome.returncode == 2
        assert says(outcome.stderr, "a whole pack is here already", "another directory")
        assert contents(target) == small.packed
        assert identities(target) == before


def test_a_directory_of_other_things_is_never_touched(
    small: Model, tmp_path: Path, moepack_command: Command
) -> None:
    (tmp_path / "experts-00000.bin").write_text("of another program")
    before = identities(tmp_path)
    for options in ([], ["--resume"]):
        outcome = moepack_command("pack", small.source, "-o", tmp_path, *options)
        assert outcome.returncode == 2
        assert says(outcome.stderr, "not empty", "empty directory")
        assert identities(tmp_path) == before


def test_a_file_in_place_of_the_target_is_never_touched(
    small: Model, tmp_path: Path, moepack_command: Command
) -> None:
    (tmp_path / "pack").write_text("a file")
    outcome = moepack_command("pack", small.source, "-o", tmp_path / "pack")
    assert outcome.returncode == 2
    assert says(outcome.stderr, "no directory")
    assert contents(tmp_path) == {"pack": b"a file"}


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_an_empty_or_new_directory_takes_a_pack(
    options: list[str], small: Model, tmp_path: Path, moepack_command: Command
) -> None:
    for target in (tmp_path, tmp_path / "new"):
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        outcome = moepack_command("pack", small.source, "-o", target, *options)
        assert outcome.returncode == 0, outcome.stderr
        assert is_whole(target, small)
        for path in target.iterdir():
            path.unlink()


def test_an_interrupted_pack_is_touched_only_with_resume(
    small: Model, tmp_path: Path, moepack_command: Command
) -> None:
    target = tmp_path / "pack"
    interrupt(small, target, 1)
    before = contents(target), identities(target)
    outcome = moepack_command("pack", small.source, "-o", target)
    assert outcome.returncode == 2
    assert says(outcome.stderr, "an interrupted pack is here", "--resume")
    assert (contents(target), identities(target)) == before


@pytest.mark.parametrize(
    "options", [["--layout", "hot-first"], ["--hotness"], ["--layers", "0-1"], []], ids=" ".join
)
def test_resuming_with_other_input_is_refused_and_touches_nothing(
    options: list[str], small: Model, tmp_path: Path, moepack_command: Command
) -> None:
    """Other input is another layout, hotness, choice of layers, or (last) another source."""
    source = small.source
    target = tmp_path / "pack"
    interrupt(small, target, 2)
    before = contents(target), identities(target)
    if options == ["--hotness"]:
        (tmp_path / "hot.csv").write_text("layer,expert,count\n0,1,5\n")
        options = [*options, str(tmp_path / "hot.csv")]
    elif not options:
        source = Path(shutil.copytree(small.source, tmp_path / "source"))
    outcome = moepack_command("pack", source, "-o", target, "--resume", *options)
    assert outcome.returncode == 2
    assert says(outcome.stderr, "made from other input", ".")
    assert (contents(target), identities(target)) == before
    resume(small, target)


# Two at once


def test_of_packs_at_once_into_one_target_exactly_one_wins(big: Model, tmp_path: Path) -> None:
    target = tmp_path / "pack"
    each = ("--threads=4", "--resume", "--resume", "--threads=1")
    processes = [machine_faults.start(big.source, "-o", target, option) for option in each]
    errors_of = {one: one.communicate(timeout=PATIENCE)[1] for one in processes}
    ended = [(errors, process.returncode) for process, errors in errors_of.items()]
    losers = [(errors, code) for errors, code in ended if code]
    assert len(losers) == 3
    for errors, code in losers:
        assert code in (1, 2)
        assert says(errors, "(another moepack|a whole pack|an interrupted pack)", ".")
    assert contents(target) == big.packed


@needs_strace()
def test_a_packer_that_falls_asleep_before_its_journal_does_not_harm_a_finished_pack(
    small: Model, tmp_path: Path
) -> None:
    """It made the directory; another one packs into it meanwhile, from start to end."""
    target = tmp_path / "pack"
    shot = Shot("mkdir mkdirat", (".",))
    with machine_faults.stopped_at(shot, target.exists, target, small.source) as (_, run_on):
        pack_model([small.source], target)
        before = identities(target)
        code, errors = run_on()
    assert code == 2
    assert says(errors, "a whole pack is here already")
    assert is_whole(target, small)
    assert identities(target) == before


@needs_strace()
def test_a_journal_that_another_packer_finished_with_is_no_lock(
    small: Model, tmp_path: Path
) -> None:
    """Between opening the journal and locking it, another packer finishes and deletes it."""
    target = tmp_path / "pack"
    shot = Shot("openat", (JOURNAL,))
    opened = (target / JOURNAL).exists
    with machine_faults.stopped_at(shot, opened, target, small.source) as (_, run_on):
        pack_model([small.source], target, resume=True)
        before = identities(target)
        code, errors = run_on()
    assert code == 1
    assert says(errors, "another moepack", "wait")
    assert is_whole(target, small)
    assert identities(target) == before


def test_a_pack_that_is_being_written_is_not_resumed_by_another(
    big: Model, tmp_path: Path, moepack_command: Command
) -> None:
    target = tmp_path / "pack"
    with machine_faults.stopped(
        target, has_finished(target, 1), big.source, "--threads", "1"
    ) as process:
        before = contents(target), identities(target)
        outcome = moepack_command("pack", big.source, "-o", target, "--resume")
        assert outcome.returncode == 1
        assert says(outcome.stderr, "another moepack is packing", "wait")
        assert moepack_command("pack", big.source, "-o", target).returncode == 2
        assert (contents(target), identities(target)) == before
        code, errors = machine_faults.resumed(process)
    assert code == 0, errors
    assert contents(target) == big.packed


# Journals


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_a_link_in_place_of_the_journal_is_not_followed(
    options: list[str], small: Model, tmp_path: Path, moepack_command: Command
) -> None:
    target = tmp_path / "pack"
    target.mkdir()
    (tmp_path / "precious").write_text("somebody else's")
    (target / JOURNAL).symlink_to(tmp_path / "precious")
    outcome = moepack_command("pack", small.source, "-o", target, *options)
    assert outcome.returncode == 2
    assert says(outcome.stderr, "not a journal" if options else "an interrupted pack", ".")
    assert (tmp_path / "precious").read_text() == "somebody else's"
    assert (target / JOURNAL).is_symlink()


def test_a_pipe_in_place_of_the_journal_is_not_waited_for(
    small: Model, tmp_path: Path, moepack_command: Command
) -> None:
    os.mkfifo(tmp_path / JOURNAL)
    outcome = moepack_command("pack", small.source, "-o", tmp_path, "--resume")
    assert outcome.returncode == 2
    assert says(outcome.stderr, "not a journal", ".")
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL]


def test_a_link_in_place_of_a_data_file_is_not_followed(small: Model, tmp_path: Path) -> None:
    target = tmp_path / "pack"
    interrupt(small, target, 1)
    (tmp_path / "precious").write_text("somebody else's")
    for name in (small.data_files[1], INDEX, f"{MANIFEST}.tmp"):
        (target / name).symlink_to(tmp_path / "precious")
    resume(small, target)
    assert (tmp_path / "precious").read_text() == "somebody else's"


def test_a_journal_cut_at_any_place_is_trusted_up_to_its_last_whole_line(
    small: Model, tmp_path: Path
) -> None:
    interrupted = tmp_path / "interrupted"
    interrupt(small, interrupted, 2)
    journal = (interrupted / JOURNAL).read_bytes()
    cuts = {*range(0, len(journal), 61), *range(len(journal) - 3, len(journal))}
    for cut in sorted(cuts):
        target = Path(shutil.copytree(interrupted, tmp_path / str(cut)))
        (target / JOURNAL).write_bytes(journal[:cut])
        finished = small.data_files[: max(journal[:cut].count(b"\n") - 1, 0)]
        before = identities(target)
        resume(small, target, finished)
        for name in set(small.data_files[:2]) - set(finished):
            assert identities(target)[name] != before[name]


def test_after_a_journal_that_was_cut_what_follows_is_trusted_again(
    small: Model, tmp_path: Path
) -> None:
    """The rest of a line that was cut must not spoil the line that a resumed pack adds."""
    target = tmp_path / "pack"
    interrupt(small, target, 2)
    os.truncate(target / JOURNAL, (target / JOURNAL).stat().st_size - 9)
    interrupt(small, target, 2, finished_before=1)
    resume(small, target, small.data_files[:2])


def other_digests(line: bytes, digests: Any) -> bytes:
    return json.dumps(json.loads(line) | {"digests": digests}).encode() + b"\n"


def garbled(line: bytes) -> list[bytes]:
    """Return lines that no journal has, made from one that it has."""
    return [
        bytes(len(line)),
        os.urandom(len(line)),
        line[:-20] + bytes(20),
        b"[" * 100_000 + b"\n",
        b'{"name": 1}\n',
        b"null\n",
        b'{"digest": 7, "name": "experts-00001.bin", "digests": ""}\n',
        other_digests(line, ""),
        other_digests(line, "00" * 8),
        other_digests(line, json.loads(line)["digests"] + "00" * 8),
        other_digests(line, 5),
    ]


def test_a_garbled_line_of_a_journal_is_not_trusted(small: Model, tmp_path: Path) -> None:
    interrupted = tmp_path / "interrupted"
    interrupt(small, interrupted, 2)
    lines = (interrupted / JOURNAL).read_bytes().splitlines(keepends=True)
    for number, line in enumerate(garbled(lines[2])):
        target = Path(shutil.copytree(interrupted, tmp_path / str(number)))
        (target / JOURNAL).write_bytes(lines[0] + lines[1] + line)
        before = identities(target)
        resume(small, target, small.data_files[:1])
        name = small.data_files[1]
        assert identities(target)[name] != before[name]


@pytest.mark.parametrize("first_line", [b"", b"\0" * 512, b"{}", b"\xff\xfe\n", b"[1]\n"])
def test_a_journal_that_says_nothing_is_begun_again(
    first_line: bytes, small: Model, tmp_path: Path
) -> None:
    target = tmp_path / "pack"
    interrupt(small, target, 2)
    (target / JOURNAL).write_bytes(first_line)
    resume(small, target, [])


def delete(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


@pytest.mark.parametrize("damage", [delete, shorten, lengthen])
def test_only_a_finished_file_that_was_damaged_is_redone(
    damage: Callable[[Path], None], small: Model, tmp_path: Path
) -> None:
    target = tmp_path / "pack"
    interrupt(small, target, 2)
    damage(target / small.data_files[0])
    resume(small, target, small.data_files[1:2])


def link_elsewhere(path: Path) -> None:
    """Put a link in place of a file, to a copy of it."""
    other = path.parent.parent / "elsewhere"
    path.rename(other)
    path.symlink_to(other)


def change_before_the_commit(
    model: Model, target: Path, change: Callable[[Path], None], *, resume: bool
) -> None:
    """Pack, and change the first file while the last one is being written."""
    last = target / model.data_files[-1]

    def progress(_length: int, _total: int) -> None:
        if last.exists():
            while len(journaled(target)) < len(model.data_files) - 1:
                time.sleep(0.001)
            change(target / model.data_files[0])

    pack_model([model.source], target, threads=1, resume=resume, progress=progress)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("damage", [delete, shorten, rewrite_with_its_time, link_elsewhere])
def test_a_finished_file_that_is_damaged_before_the_commit_is_not_committed_but_redone(
    resumed: bool, damage: Callable[[Path], None], small: Model, tmp_path: Path
) -> None:
    target = tmp_path / "pack"
    if resumed:
        interrupt(small, target, 1)
    with pytest.raises(MachineError, match="changed or removed after it was written") as caught:
        change_before_the_commit(small, target, damage, resume=resumed)
    assert caught.value.path == str(target / small.data_files[0])
    assert "`resume=True`" in (caught.value.hint or "")
    assert not is_whole(target, small)
    resume(small, target, small.data_files[1:])


def link(path: Path) -> None:
    os.link(path, path.parent.parent / "snapshot")


def touch(path: Path) -> None:
    path.touch()


@pytest.mark.parametrize("change", [link, touch])
def test_a_finished_file_whose_bytes_are_the_same_is_committed(
    change: Callable[[Path], None], small: Model, tmp_path: Path
) -> None:
    change_before_the_commit(small, tmp_path / "pack", change, resume=False)
    assert is_whole(tmp_path / "pack", small)


def test_a_whole_pack_needs_no_journal_and_bears_one(small: Model, tmp_path: Path) -> None:
    """A crash right after the commit leaves a journal, which changes nothing."""
    target = tmp_path / "pack"
    pack_model([small.source], target)
    assert sorted(contents(target)) == sorted(small.packed)
    (target / JOURNAL).write_text("left behind")
    assert is_whole(target, small)
