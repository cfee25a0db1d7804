"""How memory is divided, and how much of it there is."""

import subprocess
import sys
from pathlib import Path

import pytest

from moepack.bench.memory_group import memory_group
from moepack.errors import RequestError
from moepack.running import memory_plan
from moepack.running.memory_plan import Needs, available_memory, largest_batch, step_length
from moepack.shape import FamilyShape, ModelShape

MIB = 1 << 20
SHAPE = ModelShape(
    (
        FamilyShape(1, "ffn_exps", 64, 3 * MIB, 6),
        FamilyShape(1, "ffn_chexps", 8, MIB, 6),
        FamilyShape(2, "ffn_exps", 32, 4 * MIB, 6),
        FamilyShape(3, "ffn_exps", 4, MIB),
    )
)
NEEDS = Needs(dense=100, context=20, step=30, experts=1000)


def test_a_step_takes_what_a_token_uses_in_all_layers() -> None:
    assert step_length(SHAPE) == (6 * 3 + 6 * 4 + 4) * MIB, "all of those whose number is unknown"


@pytest.mark.parametrize(
    ("room", "count"),
    [(1, 1), (24, 1), (47, 1), (48, 2), (100, 4), (127, 5), (128, 7), (191, 10), (192, 99)],
)
def test_batches_are_as_large_as_their_experts_have_room(room: int, count: int) -> None:
    assert largest_batch(SHAPE, room * MIB, 99) == count


def test_experts_get_what_the_rest_leaves_and_no_more_than_they_are() -> None:
    assert NEEDS.budget(500, available=10) == 380
    assert NEEDS.budget(None, available=400) == 280
    assert NEEDS.budget(5000, available=10) == 1000
    assert NEEDS.budget(NEEDS.floor, available=10) == NEEDS.step


@pytest.mark.parametrize(("memory", "available"), [(149, 1000), (None, 149)])
def test_below_the_floor_the_numbers_are_told(memory: int | None, available: int) -> None:
    with pytest.raises(RequestError) as refused:
        NEEDS.budget(memory, available)
    expected = "150 B (100 B dense, 20 B context, 30 B experts of one token)"
    assert expected in str(refused.value)
    assert "found 149 B" in str(refused.value)


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
    monkeypatch.setattr(memory_plan, "_system_memory", lambda: system)
    monkeypatch.setattr(memory_plan, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory_plan, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(groups + "\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    least = system if left is None else left
    assert available_memory() == max(0, least - max(512 * MIB, least // 10))


def test_a_real_limit_is_found() -> None:
    length = 1 << 30
    code = "from moepack.running import memory_plan; print(memory_plan.available_memory())"
    with memory_group(length) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        command = group.command([sys.executable, "-c", code])
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert length - 612 * MIB <= int(run.stdout) <= length - 512 * MIB


def test_a_system_that_says_nothing_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "")
    assert memory_plan._system_memory() > 0
