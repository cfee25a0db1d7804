"""What the system allows, where it really does not: filters, limits, file systems."""

import errno
import os
import platform
import resource
from pathlib import Path

import pytest

from moepack.bench.diagnosis import system
from moepack.common.errors import MachineError
from moepack.storage.probe import choose
from tests.support import mounts, seccomp
from tests.support.needs import require_disk
from tests.support.reads import in_child

MACHINE = platform.machine()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file on a drive that is read directly, by io_uring too."""
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(8192))
    require_disk(path)
    try:
        choose("direct", [path])[0].close()
    except MachineError as error:
        pytest.skip(str(error))
    return path


def test_what_works_is_fine(file: Path) -> None:
    verdicts = {finding.name: finding.verdict for finding in system.check_reading(file)}
    assert verdicts == {"direct reads": "fine", "io_uring": "fine"}


def test_a_forbidden_io_uring_is_named(file: Path) -> None:
    def work() -> None:
        seccomp.forbid(seccomp.IO_URING_SETUP, errno.EPERM)
        direct, uring = system.check_reading(file)
        assert (direct.verdict, uring.verdict) == ("fine", "limit")
        assert uring.measured == os.strerror(errno.EPERM)
        assert "seccomp" in (uring.hint or "")
        assert (uring.hint or "").endswith("allow it; threads read meanwhile")

    in_child(work)


@pytest.mark.skipif(MACHINE not in seccomp.OPENAT, reason="the number of openat is not known")
def test_a_file_system_without_direct_reads_is_named(file: Path) -> None:
    def work() -> None:
        seccomp.forbid_direct()
        direct, _ = system.check_reading(file)
        assert direct.verdict == "limit"
        assert "page cache" in (direct.hint or "")

    in_child(work)


def test_files_in_memory_are_no_drive() -> None:
    path = Path(f"/dev/shm/moepack-test-{os.getpid()}")
    try:
        path.write_bytes(bytes(8192))
    except OSError:
        pytest.skip("there is no /dev/shm")
    try:
        (finding,) = system.check_reading(path)
        kind = system.check_file_system(path)
    finally:
        path.unlink()
    assert finding.verdict == "limit"
    assert "in memory" in (finding.measured or "")
    assert kind.measured == "tmpfs"


@pytest.mark.parametrize(
    ("release", "has_folder", "verdict"),
    [
        ("6.1.0-13-amd64", True, "fine"),
        ("6.0.12", True, "limit"),
        ("7.0", False, "limit"),
        ("gVisor", True, "unknown"),
    ],
)
def test_without_huge_pages_reads_are_slower(
    release: str, has_folder: bool, verdict: str, tmp_path: Path
) -> None:
    folder = tmp_path if has_folder else tmp_path / "none"
    finding = system.check_huge_pages(folder, release)
    assert finding.verdict == verdict
    assert ("half as fast" in (finding.hint or "")) == (verdict == "limit")


def test_open_files_are_compared_with_what_is_needed() -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
        assert system.check_open_files().verdict == "fine"
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        finding = system.check_open_files()
        assert finding.verdict != "fine"
        assert (finding.hint or "").startswith("ulimit ")

    in_child(work)


@pytest.mark.parametrize(
    ("count", "measured", "hint"),
    [
        (None, "65,530 a process: enough for 21,176 experts", None),
        (1024, "65,530 a process; the model's 1,024 experts need 5,072", None),
        (
            30_000,
            "65,530 a process; the model's 30,000 experts need 92,000",
            "sysctl vm.max_map_count=92000",
        ),
    ],
)
def test_mappings_are_compared_with_the_experts_of_the_model(
    count: int | None, measured: str, hint: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "max_map_count"
    path.write_text("65530\n")
    finding = system.check_mappings(count, path)
    assert (finding.measured, finding.hint) == (measured, hint)
    assert finding.verdict == ("fine" if hint is None else "limit")


@mounts.needs_fuse
def test_a_mount_by_a_program_is_named(packs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    with mounts.mounted(packs["qwen3moe"], folder):
        finding = system.check_file_system(next(folder.iterdir()))
    assert finding.verdict == "limit"
    assert (finding.measured or "").startswith("fuse")


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("nfs4", "limit"), ("cifs", "limit"), ("9p", "limit"), ("ext4", "fine"), ("xfs", "fine")],
)
def test_a_drive_of_another_machine_is_named(tmp_path: Path, kind: str, verdict: str) -> None:
    """By a line of /proc/self/mountinfo as proc(5) has it."""
    line = f"36 35 0:999999 / {tmp_path} rw,noatime shared:1 - {kind} server:/models rw"
    root = "22 1 0:999998 / / rw shared:1 - overlay overlay rw"
    finding = system.check_file_system(tmp_path, [root, line])
    assert (finding.measured, finding.verdict) == (kind, verdict)
    assert system.check_file_system(tmp_path, []).verdict == "unknown"
