"""Real faults for tests: signals at a chosen moment, kernel errors, file systems that are full.

Nothing here is simulated inside moepack's process: it runs as its users run it, strace makes the
kernel fail a call or kill the process at it, and mounts live in a namespace of their own.
"""

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from tests.support import children
from tests.support.children import MOEPACK, PATIENCE, Piped, run_command
from tests.support.models import tree

TRACED = (
    "mkdir mkdirat openat flock ftruncate pwrite64 write fsync rename renameat unlink unlinkat "
    "rmdir symlink symlinkat"
)
_ON_DESCRIPTOR = ("flock", "ftruncate", "pwrite64", "write", "fsync")
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")


def start(*arguments: str | Path) -> Piped:
    return Piped(*MOEPACK, "pack", *arguments)


def length_on_disk(folder: Path) -> int:
    """Return the bytes of all files below `folder` at this moment; -1 if it does not exist."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except FileNotFoundError:  # a file that was just renamed
        return 0 if folder.exists() else -1


def wait_until(reached: Callable[[], bool], process: Piped) -> None:
    """Watch until `reached()` or the end of `process`."""
    children.wait_until(lambda: reached() or process.poll() is not None, pause=0.0002)


@contextlib.contextmanager
def stopped(target: Path, reached: Callable[[], bool], source: Path) -> Iterator[Piped]:
    """Yield a `moepack pack` that stands still (SIGSTOP) at a moment, before its commit.

    It writes one file after the other.

    A packer that was too quick to be caught is given another try from the start.
    """
    for _ in range(8):
        process = start(source, "--threads", "1", "--output", target)
        wait_until(reached, process)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if process.poll() is None and not (target / "manifest.json").exists():
            break
        process.kill()
        process.communicate()
        shutil.rmtree(target)
    else:
        pytest.fail("the packer was never caught in the act")
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def resumed(process: Piped) -> tuple[int, str]:
    """Let a stopped process run to its end; return its exit code and its standard error."""
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, errors


class Call(NamedTuple):
    """One system call on a file below the target, which is the directory `.`.

    `to` is the new name of a file that is renamed.
    """

    thread: str
    name: str
    file: str
    arguments: str
    result: int
    to: str = ""


class Shot(NamedTuple):
    """Where to hit: at the `when`-th call `name` that a thread makes on one of `files`.

    Other names of the same call may follow the first one. `number` is the place in the record.
    """

    name: str
    files: tuple[str, ...]
    when: int = 1
    number: int = 0


def needs_strace() -> pytest.MarkDecorator:
    """Skip a test where strace is absent, too old, or not permitted to trace."""
    reason = "strace is not installed"
    if shutil.which("strace"):
        probe = ["strace", "-f", "--seccomp-bpf", "-z", "-o", os.devnull, "-e", "trace=fsync"]
        tried = run_command(*probe, "true")
        reason = f"strace cannot trace here: {tried.stderr.strip()}" if tried.returncode else ""
    return pytest.mark.skipif(bool(reason), reason=reason)


def record(target: Path, *arguments: str | Path) -> list[Call]:
    """Run a command to its good end; list its calls on the files in `target`, in order.

    A call stands where it ended. One that failed (an `mkdir` that finds the directory) has a
    negative result: it changed nothing, but strace counts it.
    """
    log = target.parent / "strace.log"
    options = ["-e", "status=successful,failed", "-y", "-s", "256", "-o", str(log)]
    options += ["-e", f"trace={_any_of(TRACED.split())}"]
    outcome = run_command(*_traced_command(options, target, arguments))
    assert outcome.returncode == 0, outcome.stderr
    calls = []
    for line in log.read_text().splitlines():
        if matched := _LINE.match(line):
            thread, name, text, result = matched.groups()
            pattern = r"\d+<([^>]*)>" if name in _ON_DESCRIPTOR else r'.*?"([^"]*)"'
            if name.startswith("symlink"):  # what it says comes before where it is
                pattern = r'.*"([^"]*)"'
            where = re.match(pattern, text)
            path = Path(where[1] if where else "")
            if path.is_relative_to(target):
                file, to = str(path.relative_to(target)), ""
                if name.startswith("rename"):
                    to = str(Path(re.findall(r'"([^"]*)"', text)[-1]).relative_to(target))
                calls.append(Call(thread, name, file, text, int(result), to))
    return calls


def hit(
    shot: Shot, fault: str, target: Path, *arguments: str | Path
) -> "subprocess.CompletedProcess[str]":
    """Run a command with `fault` (`error=EIO`, `signal=SIGKILL`) at the place of `shot`.

    A signal that kills does so before the call.
    """
    return run_command(*_traced_command(_aimed(shot, fault, target), target, arguments))


@contextlib.contextmanager
def stopped_at(
    shot: Shot, made: Callable[[], bool], target: Path, *arguments: str | Path
) -> Iterator[tuple[int, Callable[[], tuple[int, str]]]]:
    """Yield a command that stands still (SIGSTOP) right after the call of `shot`.

    `made` asks whether that call has been made. What is given is the number of the process, and a
    function that lets it run to its end and gives its exit code and standard error.
    """
    command = _traced_command(_aimed(shot, "signal=SIGSTOP", target), target, arguments)
    strace = Piped(*command)

    def run_on() -> tuple[int, str]:
        while strace.poll() is None:  # a SIGCONT before the stop would be void
            _signal(packer, signal.SIGCONT)
            time.sleep(0.01)
        return strace.returncode, strace.communicate()[1]

    wait_until(made, strace)
    packer = int(Path(f"/proc/{strace.pid}/task/{strace.pid}/children").read_text().split()[0])
    try:
        yield packer, run_on
    finally:
        _signal(packer, signal.SIGKILL)
        strace.communicate()


def _signal(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def shots(calls: Sequence[Call]) -> list[Shot]:
    """Return for each of `calls` that did not fail the shot that hits just this one.

    strace counts each thread's calls on their own, so a place that one count of calls on one file
    would miss is aimed at by a count over all files.
    """
    everything = tuple(dict.fromkeys(call.file for call in calls))
    aimed = []
    for number, call in enumerate(calls):
        if call.result < 0:
            continue
        for files in ((call.file,), everything):
            when = _counts(calls, call.name, files)[number]
            if _counts(calls, call.name, files).index(when) == number:
                aimed.append(Shot(call.name, files, when, number))
                break
        else:
            raise AssertionError(f"no way to hit {call}")
    return aimed


def _counts(calls: Sequence[Call], name: str, files: tuple[str, ...]) -> list[int]:
    """Say for each call the how-manieth it is in its thread; 0 for a call of no interest."""
    by_thread: Counter[str] = Counter()
    counts = []
    for call in calls:
        counted = call.name == name and call.file in files
        by_thread[call.thread] += counted
        counts.append(by_thread[call.thread] if counted else 0)
    return counts


def _any_of(names: Sequence[str]) -> str:
    return ",".join(f"?{name}" for name in dict.fromkeys(names))


def _aimed(shot: Shot, fault: str, target: Path) -> list[str]:
    calls = _any_of(shot.name.split())
    options = ["-o", os.devnull, "-e", f"trace={calls}"]
    options += [word for file in shot.files for word in ("-P", str(target / file))]
    return [*options, "-e", f"inject={calls}:{fault}:when={shot.when}"]


def _traced_command(
    options: Sequence[str], target: Path, arguments: Sequence[str | Path]
) -> list[str]:
    # The kernel stops the process at the calls of interest only; a signal would be lost so.
    filtered = [] if any("signal=" in option for option in options) else ["--seccomp-bpf"]
    command = ["strace", "-f", "-qq", *filtered, *options, *MOEPACK]
    return [*command, *map(str, arguments), "--output", str(target)]


class Disk:
    """What a disk is sure to keep of a target: bytes up to their file's last sync, and names.

    A name is created, changed or removed for sure only when its directory has been synced since.
    """

    def __init__(self, target: Path) -> None:
        """Take all that is there now as safe."""
        self.before = tree(target)
        self.lengths = {name: len(data) for name, data in self.before.items()}
        self.synced = dict(self.lengths)
        self.folders = {".", *(str(Path(name).parent) for name in self.before)}
        self.safe_folders = set(self.folders)
        self.files = {name: (name, 0) for name in self.before}
        """Which file has a name: that of its creation, and at which call it was created."""
        self.safe_files = dict(self.files)
        self.call_count = 0

    def see(self, call: Call) -> None:
        file = call.file
        self.call_count += 1
        if call.result < 0:
            return
        if call.name == "fsync" and file in self.folders:
            self._sync_folder(file)
        elif call.name == "fsync":
            self.synced[file] = self.lengths.get(file, 0)
        elif call.name == "pwrite64":
            offset = int(call.arguments.rpartition(", ")[2])
            self.lengths[file] = max(self.lengths.get(file, 0), offset + call.result)
        elif call.name == "write":
            self.lengths[file] = self.lengths.get(file, 0) + call.result
        elif call.name == "ftruncate":
            self._cut(file, int(call.arguments.rpartition(", ")[2]))
        elif call.name == "openat":
            self._open(file, call.arguments)
        elif call.name.startswith("mkdir"):
            self.folders.add(file)
        elif call.name.startswith("unlink"):
            for names in (self.lengths, self.synced, self.files):
                names.pop(file, None)
        elif call.name.startswith("rename"):
            for lengths in (self.lengths, self.synced):
                lengths[call.to] = lengths.pop(file, 0)
            self.files[call.to] = self.files.pop(file)

    def _sync_folder(self, folder: str) -> None:
        for name in [name for name in self.safe_files if str(Path(name).parent) == folder]:
            del self.safe_files[name]
        inside = {n: file for n, file in self.files.items() if str(Path(n).parent) == folder}
        self.safe_files.update(inside)
        self.safe_folders |= {each for each in self.folders if str(Path(each).parent) == folder}

    def _open(self, file: str, flags: str) -> None:
        if "O_CREAT" in flags and file not in self.files:
            self.files[file] = (file, self.call_count)
        if "O_TRUNC" in flags:
            self._cut(file, 0)

    def _cut(self, file: str, length: int) -> None:
        for lengths in (self.lengths, self.synced):
            lengths[file] = min(lengths.get(file, 0), length)

    def unsynced(self) -> set[str]:
        """Name the files that have bytes which are not safe."""
        return {file for file, length in self.lengths.items() if length > self.synced.get(file, 0)}

    def lose_power(self, target: Path) -> None:
        """Leave in `target` the worst that a loss of power may leave of it.

        Bytes that are not safe are zeros, and what was not synced of a directory was never done.
        """
        now = tree(target)
        for file in self.unsynced():
            safe = self.synced.get(file, 0)
            now[file] = now[file][:safe] + bytes(len(now[file]) - safe)
        names = {created: name for name, created in self.files.items()}
        contents = {
            name: now[names[created]] if created in names else self.before[created[0]]
            for name, created in self.safe_files.items()
            if (created in names or created[1] == 0)
            and self.safe_folders >= set(map(str, Path(name).parents))
        }
        for name in now.keys() - contents.keys():
            (target / name).unlink()
        for name, data in contents.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if now.get(name) != data:
                (target / name).write_bytes(data)


class Room:
    """A mount namespace of its own: what is mounted in it is seen from here only through `path`.

    All mounts end with it, however the tests end.
    """

    def __init__(self) -> None:
        """Open a room as root, or as the root of a user namespace where that is permitted."""
        if shutil.which("unshare") is None:
            pytest.skip("unshare is not installed")
        for options in (["--mount"], ["--mount", "--map-root-user"]):
            self._shell = Piped("unshare", *options, "sh", stderr=subprocess.DEVNULL)
            if self.run("true"):
                return
            self.close()
        pytest.skip("this user may not make a mount namespace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._shell.communicate()

    def run(self, *command: str | Path) -> bool:
        """Run a command in the room; return whether it went well."""
        words = shlex.join(map(str, command))
        try:
            self._shell.stdin.write(f"{words} >/dev/null 2>&1 </dev/null; echo $?\n")
            self._shell.stdin.flush()
        except BrokenPipeError:
            return False
        ready, _, _ = select.select([self._shell.stdout], [], [], PATIENCE)
        return bool(ready) and self._shell.stdout.readline() == "0\n"

    def mount(self, place: Path, *arguments: str | Path) -> Path:
        """Mount on the directory `place`; return the path by which it is seen from outside."""
        if not self.run("mount", *arguments, place):
            pytest.skip(f"this user may not mount: {shlex.join(map(str, arguments))}")
        return Path(f"/proc/{self._shell.pid}/root{place}")
