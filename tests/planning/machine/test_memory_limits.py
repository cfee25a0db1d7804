"""How much memory there is."""

import subprocess
import sys
from pathlib import Path

import pytest

from moepack.bench.control_group import control_group
from moepack.planning.machine import memory_limits
from moepack.planning.machine.memory_limits import available_memory, read_memory
from tests.support.own_groups import lay_groups

MIB = 1 << 20


GIB = 1 << 30
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
                "memory/x/memory.stat": f"cache 7\ninactive_file {3 * GIB}\n",
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
    assert read_memory() == (most, "read", None, None)


def test_a_real_limit_is_found() -> None:
    length = 1 << 30
    code = "from moepack.planning.machine import memory_limits as found; "
    code += "print(found.available_memory(), int(found.read_memory().value))"
    with control_group(length) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        command = group.command([sys.executable, "-c", code])
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    available, all_of_it = map(int, run.stdout.split())
    assert length - 612 * MIB <= available <= length - 512 * MIB
    assert all_of_it == length


def test_a_system_that_says_nothing_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "")
    assert memory_limits._system_field("MemTotal") > 0
