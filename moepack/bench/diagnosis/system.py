"""Checks of the system: ways to read, huge pages, limits, file systems."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moepack.common.sizes import count_text, size_text
from moepack.storage import libc
from moepack.storage.open_files import lies_in_memory
from moepack.storage.probe import problem_with_direct_reads

MAPPINGS_AN_EXPERT = 3
"""One for each of gate, up and down in memory."""
_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_OTHER_MAPPINGS = 2000
"""Those of a program and its libraries."""
_LEAST_OPEN_FILES = 512
_RING_SETUP, _RING_PARAMS_LENGTH = 425, 120
"""io_uring_setup(2), on every architecture, and its struct io_uring_params."""
_RING_REMEDIES = {
    errno.EPERM: "a container's seccomp profile, or the sysctl kernel.io_uring_disabled, forbids "
    "io_uring: allow it",
    errno.ENOSYS: "boot a kernel with io_uring",
    errno.ENOMEM: "raise the limit of locked memory (ulimit -l)",
}
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_COLLAPSES = (6, 1)
"""The first Linux with MADV_COLLAPSE."""

_REMOTE = re.compile(r"nfs\d?|cifs|smb3?|9p|ceph|glusterfs|lustre|afs|virtiofs|fuse\.sshfs")
_MOUNT = re.compile(r"(?P<device>\d+:\d+) \S+ (?P<point>\S+) .*? - (?P<kind>\S+) (?P<source>\S+)")

Verdict = Literal["fine", "limit", "problem", "unknown"]
"""`limit` works but is slow; `problem` keeps something from working."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of a report: a check by `name`, its measurement, its verdict and a hint.

    `measured` is None if nothing could be measured, `hint` if there is nothing to do.
    """

    name: str
    measured: str | None
    verdict: Verdict
    hint: str | None = None


def judged(
    name: str, measured: str | None, hint: str | None, verdict: Verdict = "limit"
) -> CheckResult:
    """Return the result of a check, which is fine if there is no hint."""
    return CheckResult(name, measured, verdict if hint else "fine", hint)


def check_reading(path: Path) -> list[CheckResult]:
    """Try to read a file past the page cache, and io_uring."""
    if lies_in_memory(path):
        measured = "the files lie in memory (tmpfs)"
        hint = "their pages take memory twice: keep models on a drive"
        return [CheckResult("direct reads", measured, "limit", hint)]
    problem = problem_with_direct_reads(path)
    hint = (
        "experts are read through the page cache, which takes memory from them: move the model to "
        "a local file system"
    )
    direct = judged("direct reads", problem or "works", problem and hint)
    return [direct, check_io_uring()] if sys.platform == "linux" else [direct]


def check_io_uring() -> CheckResult:
    """Check that a ring can be made, by which experts of `run` and `serve` are read."""
    system_call = libc.function("syscall", ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
    params = ctypes.create_string_buffer(_RING_PARAMS_LENGTH)
    descriptor = -1 if system_call is None else system_call(_RING_SETUP, 1, params)
    if descriptor >= 0:
        os.close(descriptor)
        return CheckResult("io_uring", "works", "fine")
    error = libc.last_error()
    hints = _RING_REMEDIES.get(error.errno or 0), "threads read meanwhile"
    return CheckResult("io_uring", error.strerror, "limit", "; ".join(filter(None, hints)))


def check_huge_pages(folder: Path = _HUGE_PAGES, release: str | None = None) -> CheckResult:
    """Check that the kernel collapses shared memory into huge pages: drives read faster there."""
    name = "huge pages"
    version = re.match(r"(\d+)\.(\d+)", release or platform.release())
    if version is None:
        return CheckResult(name, None, "unknown")
    if tuple(map(int, version.groups())) >= _COLLAPSES and folder.exists():
        return CheckResult(name, "work for shared memory", "fine")
    hint = "Linux 6.1 and CONFIG_TRANSPARENT_HUGEPAGE have them; reads are up to half as fast"
    return CheckResult(name, f"pages of {size_text(mmap.PAGESIZE)} alone", "limit", hint)


def check_open_files(shard_count: int = 0) -> CheckResult:
    """Compare the limit of open files with the need of shards and connections."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _LEAST_OPEN_FILES + 2 * shard_count
    if limit == resource.RLIM_INFINITY:
        return CheckResult("open files", "no limit", "fine")
    hint = f"ulimit -n {least}" if limit < least else None
    return judged("open files", f"{limit:,}", hint, "problem")


def check_mappings(expert_count: int | None = None, path: Path = _MAPPINGS) -> CheckResult:
    """Compare the limit of mapped ranges with the need of experts in memory.

    `expert_count` is the model's, None if unknown.
    """
    try:
        limit = int(path.read_text())
    except (OSError, ValueError):
        return CheckResult("mappings", None, "unknown")
    measured = f"{limit:,} a process"
    if expert_count is None:
        most = max(0, limit - _OTHER_MAPPINGS) // MAPPINGS_AN_EXPERT
        return CheckResult("mappings", f"{measured}: enough for {most:,} experts", "fine")
    needed = MAPPINGS_AN_EXPERT * expert_count + _OTHER_MAPPINGS
    measured += f"; the model's {count_text(expert_count, 'expert')} need {needed:,}"
    hint = f"sysctl vm.max_map_count={needed}" if needed > limit else None
    return judged("mappings", measured, hint)


def check_file_system(path: Path, mounts: Iterable[str] | None = None) -> CheckResult:
    """Check whether the file system of a file is local and on a fast drive.

    `mounts` are the lines of /proc/self/mountinfo.
    """
    if mounts is None:
        mounts = []
        with suppress(OSError):
            mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    matches = [match for line in mounts if (match := _MOUNT.search(line))]
    kinds = [match["kind"] for match in matches if match["device"] == number]
    kind = kinds[-1] if kinds else _by_folder(path, matches)
    if kind is None:
        return CheckResult("file system", None, "unknown")
    hint = None
    if _REMOTE.fullmatch(kind):
        hint = "a drive of another machine is slow: copy the model to a local one"
    elif kind.startswith("fuse"):
        hint = "each read goes through another program: name the underlying files, or the pack"
    elif _turns(number):
        kind += " on a rotating disk"
        hint = "a rotating disk reads few experts per second: move the model to an SSD"
    return judged("file system", kind, hint)


def _by_folder(path: Path, mounts: Iterable[re.Match[str]]) -> str | None:
    """Return the kind of the innermost mount: file systems such as btrfs make numbers up."""
    real = os.path.realpath(path)
    points = {match["point"].replace("\\040", " "): match["kind"] for match in mounts}
    inside = [one for one in points if f"{real}/".startswith(one.rstrip("/") + "/")]
    return points[max(inside, key=len)] if inside else None


def _turns(number: str) -> bool:
    """Return whether a disk rotates; virtual ones always claim to."""
    device = Path(f"/sys/dev/block/{number}")
    name = os.path.realpath(device).rpartition("/")[2]
    is_virtual = name.startswith(("vd", "xvd", "loop", "dm-", "nbd"))
    for folder in (device, device / ".."):
        with suppress(OSError):
            rotates = (folder / "queue/rotational").read_text().strip() == "1"
            return rotates and not is_virtual
    return False
