"""How much memory there is."""

import subprocess
import sys
from pathlib import Path

import pytest

from moepack.bench.memory_group import memory_group
from moepack.machine import memory_limits
from moepack.machine.memory_limits import available_memory

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
    monkeypatch.setattr(memory_limits, "_system_memory", lambda: system)
    monkeypatch.setattr(memory_limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory_limits, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(groups + "\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    least = system if left is None else left
    assert available_memory() == max(0, least - max(512 * MIB, least // 10))


def test_a_real_limit_is_found() -> None:
    length = 1 << 30
    code = "from moepack.machine import memory_limits; print(memory_limits.available_memory())"
    with memory_group(length) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        command = group.command([sys.executable, "-c", code])
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert length - 612 * MIB <= int(run.stdout) <= length - 512 * MIB


def test_a_system_that_says_nothing_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "")
    assert memory_limits._system_memory() > 0
