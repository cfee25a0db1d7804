"""How much memory there is."""

import subprocess
import sys
from pathlib import Path

import pytest

from moepack.bench.control_group import control_group
from moepack.host import memory_limits
from moepack.host.memory_limits import available_memory, kill_count, read_memory, system_memory
from tests.support.own_groups import lay_groups

MIB, GIB = 1 << 20, 1 << 30
FIRST_VERSION = "3:cpu:/x\n4:memory:/x\n0::/"
LIMIT, USAGE = "memory/x/memory.limit_in_bytes", "memory/x/memory.usage_in_bytes"


@pytest.mark.parametrize(
    ("groups", "files", "left", "most"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, 1 << 50, 64 * GIB),
        (
            "0::/a/b",
            {
                **{"a/memory.max": f"{8 * GIB}", "a/memory.current": f"{2 * GIB}"},
                **{"a/b/memory.max": f"{9 * GIB}", "a/b/memory.current": f"{GIB}"},
            },
            6 * GIB,
            8 * GIB,
        ),
        ("0::/a", {"a/memory.max": f"{5 * GIB}", "a/memory.current": "a lot"}, 1 << 50, 5 * GIB),
        ("0::/a", {"a/memory.max": "5", "a/memory.current": "9"}, 0, 0),
        (
            FIRST_VERSION,
            {
                **{LIMIT: f"{6 * GIB + 4096}", USAGE: f"{5 * GIB + 4096}"},
                "memory/x/memory.stat": f"cache 7\ntotal_inactive_file {3 * GIB}\n",
            },
            4 * GIB,
            6 * GIB,
        ),
        (  # read twice; of it something is yet to be written
            "0::/a",
            {
                **{"a/memory.max": f"{6 * GIB}", "a/memory.current": f"{5 * GIB}"},
                "a/memory.stat": f"anon {GIB}\nfile_dirty {GIB // 2}\nfile_writeback {GIB // 2}\n"
                f"inactive_file {GIB}\nactive_file {2 * GIB}\nslab_reclaimable {GIB}\n",
            },
            4 * GIB,
            6 * GIB,
        ),
        (  # the pages of a group inside the one with the limit
            "4:memory:/x/y\n0::/",
            {
                **{LIMIT: f"{6 * GIB}", USAGE: f"{5 * GIB}"},
                "memory/x/memory.stat": "inactive_file 0\nactive_file 0\ndirty 9\n"
                f"total_dirty {GIB}\ntotal_inactive_file {GIB}\ntotal_active_file {3 * GIB}\n",
                "memory/x/y/memory.limit_in_bytes": f"{(1 << 63) - 4096}",
                "memory/x/y/memory.usage_in_bytes": f"{5 * GIB}",
            },
            4 * GIB,
            6 * GIB,
        ),
        (FIRST_VERSION, {LIMIT: f"{(1 << 63) - 4096}", USAGE: "0"}, 1 << 50, 64 * GIB),
    ],
)
def test_limits_of_all_groups_count(
    groups: str,
    files: dict[str, str],
    left: int,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What may still be taken leaves a margin; what a machine has is in whole MiB."""
    system = {"MemTotal": 64 * GIB + 8192, "MemAvailable": 1 << 50}
    monkeypatch.setattr(memory_limits, "_system_field", system.__getitem__)
    lay_groups(tmp_path, groups, files, monkeypatch)
    assert available_memory() == max(0, left - max(512 * MIB, left // 10))
    assert read_memory() == most


def test_a_real_limit_is_found_and_files_that_were_read_are_free(tmp_path: Path) -> None:
    """The files are read twice, in a group inside the one with the limit."""
    length, file = 1 << 30, tmp_path / "file"
    with control_group(length) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        words = [sys.executable, "-c", _READING, str(file), str(length - 612 * MIB)]
        command = group.command(words)
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        inner, available, read, all_of_it = run.stdout.split()
        Path(inner).rmdir()
    for left in (int(available), int(read)):
        assert length - 612 * MIB <= left <= length - 512 * MIB
    assert int(all_of_it) == length


_READING = """
import os, sys, time
from moepack.host import memory_limits
from moepack.host.control_groups import own_groups
inner = next(own_groups("memory"))[0] / "inner"
inner.mkdir()
(inner / "cgroup.procs").write_text(str(os.getpid()))
print(inner, memory_limits.available_memory())
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
for _ in range(256):
    os.write(file, bytes(1 << 20))
os.fsync(file)
for _ in range(2):
    os.lseek(file, 0, os.SEEK_SET)
    while os.read(file, 1 << 20):
        pass
deadline = time.monotonic() + 20  # the kernel sums up a group's counts now and then
while memory_limits.available_memory() < int(sys.argv[2]) and time.monotonic() < deadline:
    time.sleep(0.1)
print(memory_limits.available_memory(), memory_limits.read_memory())
"""


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        (
            "0::/a/b",
            {"a/b/memory.events": "oom 9\noom_kill 3\n", "a/memory.events": "oom_kill 5"},
            3,
        ),
        ("4:memory:/x\n0::/", {"memory/x/memory.oom_control": "under_oom 0\noom_kill 2\n"}, 2),
        ("0::/a", {}, 7),
    ],
)
def test_kills_are_those_of_the_group_or_of_the_system(
    groups: str, files: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limits, "_SYSTEM_EVENTS", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    lay_groups(tmp_path, groups, files, monkeypatch)
    assert kill_count() == count


def test_a_system_that_says_nothing_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "")
    assert system_memory() > 0
