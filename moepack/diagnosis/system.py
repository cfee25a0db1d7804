"""What the system allows: ways to read, page faults, huge pages, and its limits."""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from moepack.diagnosis.finding import Finding
from moepack.errors import MachineError
from moepack.pager.huge_pages import HUGE_PAGE, HugePages
from moepack.pager.page_faults import check_page_faults
from moepack.sizes import size_text
from moepack.storage import probe
from moepack.storage.open_files import lies_in_memory

MAPPINGS_AN_EXPERT = 3
"""One for each of gate, up and down that is in memory."""
_MAPPINGS = Path("/proc/sys/vm/max_map_count")
_OTHER_MAPPINGS = 2000
"""Those of a program and its libraries."""
_LEAST_OPEN_FILES = 512
_LEAST_LOCKED = 8 << 20
_DEPTH = 4


def check_reading(path: Path) -> list[Finding]:
    """Try the ways to read a file: io_uring, and past the page cache."""
    if lies_in_memory(path):
        measured = "the files lie in memory (tmpfs)"
        hint = "what is read of them takes memory twice: keep models on a drive"
        return [Finding("direct reads", measured, "limit", hint)]
    return [_way("direct reads", "direct", path), _way("io_uring", "uring", path)]


def _way(name: str, backend: str, path: Path) -> Finding:
    try:
        chosen, _ = probe.choose(backend, [path], _DEPTH)
    except MachineError as error:
        problem = str(error.problem).rpartition("here: ")[2]
        if backend == "direct":
            hint = "experts come through the page cache, which takes memory from them: move the "
            return Finding(name, problem, "limit", f"{hint}model to a local file system")
        hint = (error.hint or "").partition(", or ask for")[0]
        return Finding(name, problem, "limit", f"{hint}; threads read meanwhile")
    chosen.close()
    return Finding(name, "works", "fine")


def check_faults() -> Finding:
    """Ask the system for page faults, which packs need."""
    try:
        check_page_faults()
    except MachineError as error:
        return Finding("page faults", str(error.problem), "problem", error.hint)
    return Finding("page faults", "userfaultfd works", "fine")


def check_huge_pages() -> Finding:
    """Have a huge page of shared memory, into which a drive reads faster."""
    name = "huge pages"
    if not hasattr(os, "memfd_create"):
        return Finding(name, None, "unknown")
    descriptor = os.memfd_create("moepack-doctor")
    try:
        os.ftruncate(descriptor, HUGE_PAGE)
        HugePages(descriptor, HUGE_PAGE).fill(0, HUGE_PAGE)
        length = os.fstat(descriptor).st_blocks * 512
    finally:
        os.close(descriptor)
    if length >= HUGE_PAGE:
        return Finding(name, "work for shared memory", "fine")
    hint = "Linux 6.1 and CONFIG_TRANSPARENT_HUGEPAGE have them; reads are up to half as fast"
    return Finding(name, f"pages of {size_text(mmap.PAGESIZE)} alone", "limit", hint)


def check_open_files(shard_count: int = 0) -> Finding:
    """Compare the limit of open files with what shards and connections take."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _LEAST_OPEN_FILES + 2 * shard_count
    if limit == resource.RLIM_INFINITY or limit >= least:
        return Finding("open files", _limit_text(limit), "fine")
    return Finding("open files", _limit_text(limit), "problem", f"ulimit -n {least}")


def check_locked_memory() -> Finding:
    """Compare the limit of locked memory with what io_uring registers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_enough = limit == resource.RLIM_INFINITY or limit >= _LEAST_LOCKED
    measured = "no limit" if limit == resource.RLIM_INFINITY else size_text(limit)
    if is_enough:
        return Finding("locked memory", measured, "fine")
    hint = f"ulimit -l {_LEAST_LOCKED >> 10}: io_uring may be refused without it"
    return Finding("locked memory", measured, "limit", hint)


def check_mappings(expert_count: int | None = None, path: Path = _MAPPINGS) -> Finding:
    """Compare how many ranges a process may map with what experts in memory take.

    `expert_count` is of a model; None is not known.
    """
    try:
        limit = int(path.read_text())
    except (OSError, ValueError):
        return Finding("mappings", None, "unknown")
    room = max(0, limit - _OTHER_MAPPINGS) // MAPPINGS_AN_EXPERT
    measured = f"{limit:,} a process, for some {room:,} experts in memory"
    if expert_count is None or expert_count <= room:
        return Finding("mappings", measured, "fine")
    needed = MAPPINGS_AN_EXPERT * expert_count + _OTHER_MAPPINGS
    hint = f"the model has {expert_count:,}: sysctl vm.max_map_count={needed}"
    return Finding("mappings", measured, "limit", hint)


def _limit_text(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,}"


_REMOTE = re.compile(r"nfs\d?|cifs|smb3?|9p|ceph|glusterfs|lustre|afs|virtiofs|fuse\.sshfs")
_LINE = re.compile(r"(?P<device>\d+:\d+) \S+ (?P<point>\S+) .*? - (?P<kind>\S+) (?P<source>\S+)")


def check_file_system(path: Path, mounts: Iterable[str] | None = None) -> Finding:
    """Name the file system of a file, and whether it comes from elsewhere.

    `mounts` are the lines of /proc/self/mountinfo.
    """
    if mounts is None:
        mounts = []
        with suppress(OSError):
            mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found = [match for line in mounts if (match := _LINE.search(line))]
    kinds = [match["kind"] for match in found if match["device"] == number]
    kind = kinds[-1] if kinds else _by_folder(path, found)
    if kind is None:
        return Finding("file system", None, "unknown")
    if _REMOTE.fullmatch(kind):
        hint = "a drive of another machine answers late: copy the model to a local one"
        return Finding("file system", kind, "limit", hint)
    if kind.startswith("fuse"):
        hint = "each read goes through another program: name the files behind it, or the pack"
        return Finding("file system", kind, "limit", hint)
    if _turns(number):
        hint = "a disk that turns reads few experts a second: move the model to an SSD"
        return Finding("file system", f"{kind} on a disk that turns", "limit", hint)
    return Finding("file system", kind, "fine")


def _by_folder(path: Path, mounts: Iterable[re.Match[str]]) -> str | None:
    """Return the kind of the innermost mount: file systems such as btrfs make numbers up."""
    real = os.path.realpath(path)
    points = {match["point"].replace("\\040", " "): match["kind"] for match in mounts}
    inside = [one for one in points if f"{real}/".startswith(one.rstrip("/") + "/")]
    return points[max(inside, key=len)] if inside else None


def _turns(number: str) -> bool:
    device = Path(f"/sys/dev/block/{number}")
    for folder in (device, device / ".."):
        try:
            return (folder / "queue/rotational").read_text().strip() == "1" and not _is_virtual(
                device
            )
        except OSError:
            continue
    return False


def _is_virtual(device: Path) -> bool:
    """Return whether a disk is a virtual machine's, which says that it turns, whatever it is."""
    name = os.path.realpath(device).rpartition("/")[2]
    return name.startswith(("vd", "xvd", "loop", "dm-", "nbd"))
