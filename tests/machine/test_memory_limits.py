"""How much memory there is."""

import subprocess
import sys
from pathlib import Path

import pytest

from moepack.bench.control_group import control_group
from moepack.machine import memory_limits
from moepack.machine.memory_limits import available_memory, read_memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/a/b", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, None),
        ("0::/a", {"a/memory.max": "9000000000", "a/memory.current": "4000000000"}, 5000000000),
        (
            "0::/a/b",
            {
                **{"a/memory.max": "8000000000", "a/memory.current": "2000000000"},
                **{"a/b/memory.max": "9000000000", "a/b/memory.current": "1000000000"},
            },
            6000000000,
        ),
        (
            "0::/gone/since",
            {"memory.max": "7000000000", "memory.current": "0"},
            7000000000,
        ),
        (
            "3:cpu:/x\n4:memory:/x\n0::/",
            {
                **{"memory/x/memory.limit_in_bytes": "6000000000"},
                **{"memory/x/memory.usage_in_bytes": "5000000000"},
                **{"memory/x/memory.stat": "cache 7\ninactive_file 3000000000\n"},
            },
            4000000000,
        ),
        ("0::/a", {"a/memory.max": "5", "a/memory.current": "a lot"}, None),
        ("0::/a", {"a/memory.max": "5", "a/memory.current": "9"}, 0),
        ("no group\n0::/a", {"a/memory.max": "7", "a/memory.current": "3"}, 4),
    ],
)
def test_limits_of_all_groups_count(
    groups: str,
    files: dict[str, str],
    left: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = 1 << 50
    monkeypatch.setattr(memory_limits, "_system_field", lambda _: system)
    lay_groups(tmp_path, groups, files, monkeypatch)
    least = system if left is None else left
    assert available_memory() == max(0, least - max(512 * MIB, least // 10))


@pytest.mark.parametrize(
    ("groups", "files", "least"),
    [
        ("0::/a/b", {"a/b/memory.max": "max"}, 64 << 30),
        (
            "0::/a/b",
            {
                **{"a/memory.max": str(6 << 30), "a/memory.current": str(5 << 30)},
                "a/b/memory.max": str(7 << 30),
            },
            6 << 30,
        ),
        ("4:memory:/x", {"memory/x/memory.limit_in_bytes": str((5 << 30) + 4096)}, 5 << 30),
        ("4:memory:/x", {"memory/x/memory.limit_in_bytes": str((1 << 63) - 4096)}, 64 << 30),
    ],
)
def test_the_memory_of_a_machine_is_the_least_limit_and_not_what_is_left_of_it(
    groups: str,
    files: dict[str, str],
    least: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = {"MemTotal": (64 << 30) + 8192, "MemAvailable": 1 << 30}
    monkeypatch.setattr(memory_limits, "_system_field", system.__getitem__)
    lay_groups(tmp_path, groups, files, monkeypatch)
    assert read_memory() == (least, "read", None, None)


def lay_groups(
    folder: Path, groups: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put this process into groups, of which `files` tell."""
    monkeypatch.setattr(memory_limits, "ROOT", folder)
    monkeypatch.setattr(memory_limits, "OWN_GROUPS", folder / "own")
    (folder / "own").write_text(groups + "\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_real_limit_is_found() -> None:
    length = 1 << 30
    code = "from moepack.machine import memory_limits as found; "
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
