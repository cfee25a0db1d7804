"""Nothing is lost: whatever happens to `moepack pack`, there is no pack or a whole one.

Each test lets something real happen to a real process, and then asks the same questions: is there
no pack, or a whole one; does `--resume` end at the very bytes of a pack that was never disturbed;
were finished files left alone; is the source as it was?
"""

import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import moepack
from moepack.cli import main
from moepack.common.errors import MachineError, PackError, RequestError
from moepack.pack.verifying.verifier import verify
from moepack.packing.writing.unfinished_pack import UnfinishedPack
from moepack.report import pack_text
from tests.support import damages, gguf_builder, machine_faults
from tests.support.amounts import amounts
from tests.support.children import PATIENCE, wait_until
from tests.support.interruptions import StopHereError, record_calls
from tests.support.machine_faults import Disk, Room, Shot, length_on_disk, needs_strace
from tests.support.models import contents, flip, pack_model, tree
from tests.support.warm_command import Run

MANIFEST = "manifest.json"
INDEX = "index.bin"
JOURNAL = "pack.journal"
RECORDS = "pack.records"
MIB = 1 << 20


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


def recorded(target: Path) -> list[str]:
    """Name the files in `target` that have a record, in the order in which they are written."""
    names = [path.stem for path in (target / RECORDS).glob("*.bin.json")]
    return sorted(names, key=lambda name: (name == "dense.bin", name))


def left_beside(data_files: Sequence[str]) -> set[str]:
    """Name all that an interrupted packer leaves beside finished data files."""
    return {JOURNAL, f"{RECORDS}/input.json", *(f"{RECORDS}/{name}.json" for name in data_files)}


def has_bytes(target: Path, length: int) -> Callable[[], bool]:
    """Return the question whether `length` bytes are in `target`."""
    return lambda: length_on_disk(target) >= length


def has_finished(target: Path, count: int) -> Callable[[], bool]:
    """Return the question whether `count` files have records in `target`."""
    return lambda: len(recorded(target)) >= count


def make_model(folder: Path, layers: int, experts: int, ne: tuple[int, int], shards: int) -> Model:
    """Build a model of `layers` files, and pack it once undisturbed."""
    source = folder / "source"
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


def interrupt(model: Model, target: Path, finished_count: int, *, finished_before: int = 0) -> None:
    """Leave in `target` what an interruption leaves when `finished_count` files are finished.

    `finished_before` of them were so before another interruption.
    """
    names = model.data_files[:finished_count]  # those from before are read again
    left = sum(len(model.packed[name]) for name in names)

    def progress(length: int, _total: int) -> None:
        nonlocal left
        left -= length
        if left < 0:
            raise StopHereError

    with pytest.raises(StopHereError):
        pack_model([model.source], target, threads=1, progress=progress, resume=finished_before > 0)
    assert recorded(target) == model.data_files[:finished_count]
    with pytest.raises(PackError, match="not a whole pack") as caught:
        verify(target)
    assert "resume" in str(caught.value.hint)


def is_whole(target: Path, model: Model) -> bool:
    """Return whether there is a pack; it has to be whole then, and else nothing may open it.

    A crash right after the commit leaves records and the lock, which change nothing.
    """
    if (target / MANIFEST).exists():
        files = tree(target)
        assert {name: files[name] for name in model.packed} == model.packed
        others = files.keys() - model.packed.keys()
        assert all(name == JOURNAL or name.startswith(RECORDS) for name in others)
        assert verify(target).passed
        return True
    with pytest.raises(PackError):
        moepack.open(target)
    with pytest.raises(PackError):
        verify(target)
    return False


def resume(model: Model, target: Path, finished: Sequence[str] | None = None) -> None:
    """Pack with `resume`: the result is as if nothing had happened, and `finished` was not redone.

    By default the files with records are the finished ones.
    """
    names = recorded(target) if finished is None else finished
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


@pytest.mark.parametrize(
    ("number", "shares"),
    [
        (signal.SIGKILL, (0.0, 0.6, 0.95)),
        (signal.SIGINT, (0.6, 0.3)),
        (signal.SIGTERM, (0.6, 0.9)),
    ],
)
def test_killed_at_any_moment_it_leaves_no_pack_or_a_whole_one_and_resumes(
    number: signal.Signals,
    shares: Sequence[float],
    big: Model,
    tmp_path: Path,
    cli: Run,
) -> None:
    """Moments are shares of the bytes written, so that they do not depend on the machine's speed.

    Every other time, four files are written at once.
    """
    interrupted = 0
    for moment, share in enumerate(shares):
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
            assert says(errors, "interrupted", "--resume" if recorded(target) else ""), errors
            if target.exists():
                assert tree(target).keys() == {*recorded(target), *left_beside(recorded(target))}
        finished = {name: identities(target)[name] for name in recorded(target)}
        outcome = cli("pack", big.source, "-o", target, "--resume", "--json")
        assert outcome.returncode == 0, outcome.stderr
        assert contents(target) == big.packed
        assert finished.items() <= identities(target).items()
        assert json.loads(outcome.stdout)["resumed_file_count"] == len(finished)
        shutil.rmtree(target)
    assert interrupted


def is_data_file(name: str) -> bool:
    """Return whether a file is one that is being written, or was."""
    return name.endswith(".bin") and Path(name).name != INDEX


class Scene:
    """A run of `moepack pack` that is disturbed at each of its calls on files in its target.

    The run is recorded once, undisturbed: from where two files are finished, or from the start. In
    the latter only what comes before the first data file is disturbed; the rest is the same.
    """

    def __init__(self, folder: Path, model: Model, *, resumed: bool) -> None:
        self.model = model
        self.before = folder / "before"
        self.finished = model.data_files[:2] if resumed else []
        self.arguments: list[str | Path] = ["pack", model.source, "--threads", "1"]
        self.arguments += ["--resume"] if resumed else []
        if resumed:
            interrupt(model, self.before, len(self.finished))
            # What a loss of power leaves of a file that was written and not synced.
            name = model.data_files[len(self.finished)]
            for unsynced in (self.before / name, self.before / RECORDS / "writing" / name):
                unsynced.parent.mkdir(exist_ok=True)
                unsynced.write_bytes(bytes(len(model.packed[name])))
        target = self.prepare(folder / "recorded")
        self.calls = machine_faults.record(target, *self.arguments)
        assert is_whole(target, model)
        shots = machine_faults.shots(self.calls)
        first = next(
            n for n, shot in enumerate(shots) if is_data_file(self.calls[shot.number].file)
        )
        self.shots = shots[: None if resumed else first]
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
        return "--resume" if locked and recorded(target) else ""


@pytest.fixture(scope="module", params=[False, True], ids=["first run", "resumed run"])
def scene(
    request: pytest.FixtureRequest, small: Model, tmp_path_factory: pytest.TempPathFactory
) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"), small, resumed=request.param)


def in_pairs(work: Callable[[Shot], None], aimed: Sequence[Shot]) -> None:
    """Do `work` for each shot, two at a time: a machine of two cores is the least to expect."""
    with ThreadPoolExecutor(2) as executor:
        for _ in executor.map(work, aimed):
            pass


@needs_strace()
@pytest.mark.parametrize("step", amounts(19, 1))
def test_killed_before_any_call_and_robbed_of_what_was_not_synced_it_resumes(
    scene: Scene, tmp_path: Path, step: int
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

    in_pairs(kill, scene.shots[::step])


@needs_strace()
@pytest.mark.parametrize("step", amounts(23, 1))
def test_a_call_that_fails_once_leaves_no_pack_and_resumes(
    scene: Scene, tmp_path: Path, step: int
) -> None:
    """Every fsync in turn, and every other call as well, ends with an I/O error."""

    def fail(shot: Shot) -> None:
        target, outcome = scene.hit(shot, "error=EIO", tmp_path)
        if shot.name == "openat" and shot.files[0] in scene.finished:  # written anew, elsewhere
            assert (outcome.returncode, is_whole(target, scene.model)) == (0, True)
            return
        assert outcome.returncode == 6, (shot, outcome)
        committed = any(call.to == MANIFEST for call in scene.calls[: shot.number])
        hint = "moepack verify" if committed else scene.hint_after(shot, target)
        error = "the pack is whole.*Input/output error" if committed else "Input/output error"
        assert says(outcome.stderr, error, hint), shot
        assert (target / MANIFEST).exists() == committed, shot
        if target.exists() and not scene.finished and shot.name != "flock":
            assert tree(target).keys() & set(scene.model.data_files), shot
        scene.check_resumes(target)

    in_pairs(fail, scene.shots[::step])


@needs_strace()
def test_interrupted_while_the_journal_is_closed_it_closes_nothing_twice(
    small: Model, tmp_path: Path
) -> None:
    """The journal is closed when it has been removed, and Linux says so in its name."""
    target = tmp_path / "pack"
    shot = Shot("close", (JOURNAL, f"{JOURNAL} (deleted)"))
    outcome = machine_faults.hit(shot, "signal=SIGINT", target, "pack", small.source)
    assert outcome.returncode == 130, outcome.stderr
    assert says(outcome.stderr, "interrupted")
    assert is_whole(target, small)


@needs_strace()
def test_a_finished_file_that_is_redone_is_not_trusted_before_it_is_synced_again(
    small: Model, tmp_path: Path
) -> None:
    """The record of the file's first life is still there when the power fails in its second."""
    target = tmp_path / "pack"
    interrupt(small, target, 2)
    name = small.data_files[0]
    (target / name).unlink()
    shot = Shot("fsync", (f"{RECORDS}/writing/{name}",))
    outcome = machine_faults.hit(shot, "signal=SIGKILL", target, "pack", small.source, "--resume")
    assert outcome.returncode == -signal.SIGKILL
    (target / name).write_bytes(bytes(len(small.packed[name])))
    resume(small, target, small.data_files[1:2])


# The order of events


@needs_strace()
@pytest.mark.parametrize("threads", ["1", "4"])
def test_nothing_is_promised_before_it_is_synced(
    threads: str, small: Model, tmp_path: Path
) -> None:
    target = tmp_path / "pack"
    disk = Disk(target)
    calls = machine_faults.record(target, "pack", small.source, "--threads", threads)
    calls = [call for call in calls if call.result >= 0]
    promised: list[str] = []
    beside = left_beside(small.data_files)
    for call in calls:
        if call.to.endswith(".bin.json"):
            name = Path(call.to).stem
            assert not disk.unsynced() & {name, call.file}
            assert disk.safe_files[name] == disk.files[name]
            assert RECORDS in disk.safe_folders
            promised.append(name)
        if call.name == "openat" and is_data_file(call.file) and "O_CREAT" in call.arguments:
            assert {JOURNAL, f"{RECORDS}/input.json"} <= disk.safe_files.keys()
        if call.to == MANIFEST:
            assert not disk.unsynced()
            assert {*small.data_files, INDEX, *beside} <= disk.files.keys()
            assert disk.safe_files == disk.files
        if call.name.startswith("unlink") and call.file in (
            JOURNAL,
            *left_beside(small.data_files),
        ):
            assert MANIFEST in disk.safe_files
        disk.see(call)
    assert (calls[-1].name, calls[-1].file) == ("unlink", JOURNAL)
    assert JOURNAL not in disk.files
    assert sorted(promised) == sorted(small.data_files)
    assert disk.lengths[MANIFEST] == len(small.packed[MANIFEST])


# Disks


def test_a_new_target_is_synced_into_its_parent(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = record_calls(monkeypatch)
    pack_model([small.source], tmp_path / "pack")
    assert events.index(tmp_path.name) < events.index("pack")


def test_a_disk_that_fills_up_midway_leaves_what_resume_continues(
    big: Model, room: Room, tmp_path: Path, cli: Run
) -> None:
    disk = room.mount(tmp_path, "-t", "tmpfs", "-o", f"size={big.length + MIB}", "tmpfs")
    target, filler = disk / "pack", disk / "filler"
    with machine_faults.stopped(target, has_finished(target, 1), big.source) as process:
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * 4096)
        code, errors = machine_faults.resumed(process)
    assert code == 6
    assert says(errors, "no space left", "free some space.*--resume")
    assert not is_whole(target, big)
    assert tree(target).keys() == {*recorded(target), *left_beside(recorded(target))}
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
    with machine_faults.stopped(target, reached, big.source) as process:
        process.kill()
        process.communicate()
    resume(big, target)


@needs_strace()
def test_a_write_that_was_cut_short_is_continued(big: Model, tmp_path: Path) -> None:
    """The limit on a file's length cuts a write short, and is lifted before the next one."""
    target = tmp_path / "pack"
    first = target / RECORDS / "writing" / big.data_files[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = MIB + 4321
    shot = Shot("pwrite64", (str(first.relative_to(target)),), 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with machine_faults.stopped_at(
            shot, lambda: first.exists() and first.stat().st_size == limit, target,
            "pack", big.source, "--threads", "1",
        ) as (packer, run_on):  # fmt: skip
            resource.prlimit(packer, resource.RLIMIT_FSIZE, (soft, hard))
            code, errors = run_on()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 0, errors
    assert is_whole(target, big)


# Sources


def test_a_read_only_source_is_read_and_left_as_it_was(
    big: Model, room: Room, tmp_path: Path, cli: Run
) -> None:
    """The source lies on a read-only mount, for root can write to everything else."""
    before = contents(big.source), identities(big.source)
    place = tmp_path / "source"
    place.mkdir()
    room.mount(place, "--bind", big.source)
    source = room.mount(place, "-o", "remount,bind,ro")
    with pytest.raises(OSError, match="Read-only file system"):
        (source / "proof").touch()
    outcome = cli("pack", source, "-o", tmp_path / "pack")
    assert outcome.returncode == 0, outcome.stderr
    assert is_whole(tmp_path / "pack", big)
    assert (contents(big.source), identities(big.source)) == before
    outcome = cli("pack", big.source, "-o", source / "pack")
    assert outcome.returncode == 6
    assert says(outcome.stderr, "Read-only file system")


def change_a_byte(shard: Path) -> None:
    """Change the last byte of tensor data."""
    flip(shard, shard.stat().st_size - 1)


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


@pytest.mark.parametrize(
    ("change", "shard"),
    [(change_a_byte, 0), (rewrite_with_its_time, 3), (truncate, 3), (replace, 0)],
)
def test_a_source_that_changes_while_it_is_read_makes_no_pack(
    change: Callable[[Path], None], shard: int, big: Model, tmp_path: Path
) -> None:
    """When the packer is stopped, it has read the first shard and not yet the last one."""
    source = Path(shutil.copytree(big.source, tmp_path / "source"))
    changed = sorted(source.iterdir())[shard]
    target = tmp_path / "pack"
    with machine_faults.stopped(target, has_finished(target, 2), source) as process:
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
    shot = Shot("preadv preadv2", (str(shard),), 4)
    outcome = machine_faults.hit(shot, "error=EIO", target, "pack", small.source, "--threads", "1")
    assert outcome.returncode == 6  # the drive is at fault, not the model
    assert says(outcome.stderr, f"{shard.name}.*Input/output error", "--resume")
    resume(small, target)


# Targets


def state(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Map all below a folder, links and pipes among it, to what changes when it is touched."""
    states = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        states[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, data)
    return states


def pack_whole(model: Model, target: Path) -> None:
    pack_model([model.source], target)


def interrupt_early(model: Model, target: Path) -> None:
    interrupt(model, target, 2)


def write_other_file(_model: Model, target: Path) -> None:
    target.mkdir()
    (target / "experts-00000.bin").write_text("of another program")


def write_file(_model: Model, target: Path) -> None:
    target.write_text("a file")


def link_journal(_model: Model, target: Path) -> None:
    target.mkdir()
    (target.parent / "precious").write_text("somebody else's")
    (target / JOURNAL).symlink_to(target.parent / "precious")


def make_pipe(_model: Model, target: Path) -> None:
    target.mkdir()
    os.mkfifo(target / JOURNAL)


@pytest.mark.parametrize("options", [[], ["--sha256"], ["--strong"], ["--layout", "hot-first"]])
def test_a_job_that_has_made_its_pack_can_be_run_again(
    options: list[str], small: Model, tmp_path: Path, cli: Run
) -> None:
    target = tmp_path / "pack"
    words = ("pack", small.source, "-o", target, *options)
    assert cli(*words).returncode == 0
    before = state(target)
    for again in ((), ("--resume",), ("--dry-run",)):
        run = cli(*words, *again)
        assert run.returncode == 0, run.stderr
        assert f"{target}: is there already, of shards with these names" in run.stdout
        assert "no part was read" in run.stdout
        assert state(target) == before
    damages: dict[str, Callable[[Path], None]] = {
        "the file is not as long": shorten,
        "a data file is missing": Path.unlink,
    }
    for problem, damage in damages.items():
        damage(target / "dense.bin")
        run = cli(*words)
        assert (run.returncode, problem in run.stderr) == (4, True)
        assert "hint: remove the pack, and run the same again" in run.stderr


@pytest.mark.parametrize(
    ("make", "options", "error", "hint"),
    [
        (pack_whole, ["--sha256"], "a whole pack is here already", "another directory"),
        (pack_whole, ["--strong", "--resume"], "a whole pack is here already", "another directory"),
        (pack_whole, ["--alignment", "64KiB"], "a whole pack is here already", "another directory"),
        (pack_whole, ["--layers", "0"], "a whole pack is here already", "another directory"),
        (write_other_file, [], "not empty", "empty directory"),
        (write_other_file, ["--resume"], "not empty", "empty directory"),
        (write_file, [], "not a directory", ""),
        (interrupt_early, [], "an interrupted pack is here", "--resume"),
        (interrupt_early, ["--resume", "--layout", "hot-first"], "made from other input", "."),
        (interrupt_early, ["--resume", "--hotness", "hot.csv"], "made from other input", "."),
        (interrupt_early, ["--resume", "--layers", "0-1"], "made from other input", "."),
        (interrupt_early, ["--resume", "another source"], "made from other input", "."),
        (link_journal, [], "an interrupted pack", "."),
        (link_journal, ["--resume"], "not a journal", "."),
        (make_pipe, ["--resume"], "not a journal", "."),
    ],
)
def test_what_is_in_the_way_is_never_touched(
    make: Callable[[Model, Path], None],
    options: list[str],
    error: str,
    hint: str,
    small: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither whole packs and files of others, nor what another run has begun with other input."""
    monkeypatch.chdir(tmp_path)
    target, source = tmp_path / "pack", str(small.source)
    if "another source" in options:
        source, options = shutil.copytree(small.source, "source"), ["--resume"]
    Path("hot.csv").write_text("layer,expert,count\n0,1,5\n")
    make(small, target)
    before = state(tmp_path)
    assert main.run(["pack", source, "-o", str(target), *options]) == 2
    errors = capsys.readouterr().err
    assert says(errors, error, hint), errors
    assert state(tmp_path) == before
    if make is interrupt_early:
        resume(small, target)


# Two at once


@needs_strace()
@pytest.mark.parametrize(
    ("shot", "resumes", "code", "error"),
    [
        # It has made the directory.
        (Shot("mkdir mkdirat", (".",)), False, 2, "a whole pack is here already"),
        # It has opened the journal, which the other one deletes, and has not locked it.
        (Shot("openat", (JOURNAL,)), True, 1, "another moepack"),
    ],
    ids=["directory", "journal"],
)
def test_a_packer_that_falls_asleep_does_not_harm_what_another_one_finishes(
    shot: Shot, resumes: bool, code: int, error: str, small: Model, tmp_path: Path
) -> None:
    """The other one packs meanwhile, from start to end."""
    target = tmp_path / "pack"
    made = (target / shot.files[0]).exists
    with machine_faults.stopped_at(shot, made, target, "pack", small.source) as (_, run_on):
        pack_model([small.source], target, resume=resumes)
        before = identities(target)
        outcome, errors = run_on()
    assert outcome == code
    assert says(errors, error)
    assert is_whole(target, small)
    assert identities(target) == before


def test_a_pack_that_is_being_written_is_not_resumed_by_another(
    big: Model, tmp_path: Path, cli: Run
) -> None:
    target = tmp_path / "pack"
    with machine_faults.stopped(target, has_finished(target, 1), big.source) as process:
        before = tree(target), identities(target)
        outcome = cli("pack", big.source, "-o", target, "--resume")
        assert outcome.returncode == 1
        assert says(outcome.stderr, "another moepack is packing", "wait")
        assert cli("pack", big.source, "-o", target).returncode == 2
        assert (tree(target), identities(target)) == before
        code, errors = machine_faults.resumed(process)
    assert code == 0, errors
    assert contents(target) == big.packed


# Journals


def test_a_link_in_place_of_a_data_file_is_not_followed(small: Model, tmp_path: Path) -> None:
    target = tmp_path / "pack"
    interrupt(small, target, 1)
    (tmp_path / "precious").write_text("somebody else's")
    for name in (small.data_files[1], INDEX, f"{MANIFEST}.tmp"):
        (target / name).symlink_to(tmp_path / "precious")
    resume(small, target)
    assert (tmp_path / "precious").read_text() == "somebody else's"


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "strong"),
    [
        *((damage, False) for damage in (damages.change_padding_between_parts, *damages.DAMAGES)),
        *((damage, True) for damage in (shorten, damages.change_a_byte)),
    ],
)
def test_only_a_finished_file_that_was_damaged_is_redone(
    damage: damages.Damage, strong: bool, small: Model, tmp_path: Path
) -> None:
    """Its stamp tells nothing: finished files are read again."""
    target = tmp_path / "pack"
    interrupt(small, target, 2)
    name, other = small.data_files[:2]
    damage(target / name)
    before = identities(target)[other]
    done = moepack.pack_model(small.source, target, resume=True, strong=strong)
    assert identities(target)[other] == before
    assert verify(target, small.source).passed
    packed = contents(target)
    assert {one: packed[one] for one in small.data_files} == {
        one: small.packed[one] for one in small.data_files
    }
    assert done.damaged_files == (name,)
    assert f"damaged, and written anew: {name}" in pack_text.packed(done)
    assert "1 finished before: every part had its digest" in pack_text.packed(done)


def test_a_file_that_changes_after_it_was_written_gets_no_strong_digests(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no stamp tells of it, the digests that are computed again do."""
    target = tmp_path / "pack"
    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedPack, "find_damaged", lambda *_: [])
        change = partial(change_before_the_commit, small, target, damages.change_a_byte)
        with pytest.raises(MachineError, match="changed after it was written") as caught:
            change(resume=False, strong=True)
    assert str(target / small.data_files[0]) == caught.value.path
    assert "expert" in str(caught.value.place)
    resume(small, target, small.data_files[1:])


def link_elsewhere(path: Path) -> None:
    """Put a link in place of a file, to a copy of it."""
    other = path.parent.parent / "elsewhere"
    path.rename(other)
    path.symlink_to(other)


def change_before_the_commit(
    model: Model,
    target: Path,
    change: Callable[[Path], None],
    *,
    resume: bool,
    strong: bool = False,
) -> None:
    """Pack, and change the first file while the last one is being written."""
    last = target / RECORDS / "writing" / model.data_files[-1]

    def progress(_length: int, _total: int) -> None:
        if last.exists():
            wait_until(has_finished(target, len(model.data_files) - 1))
            change(target / model.data_files[0])

    pack_model([model.source], target, threads=1, resume=resume, strong=strong, progress=progress)


@pytest.mark.parametrize(
    ("damage", "resumed"),
    [
        *((damage, False) for damage in (Path.unlink, shorten, link_elsewhere)),
        *((damage, True) for damage in (Path.unlink, rewrite_with_its_time)),
    ],
)
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
