"""How many threads may compute: processors, control groups, and the work of others."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from moepack.host import processors
from moepack.host.processors import OtherWork, fewer_threads, limited_threads
from tests.support.own_groups import lay_groups

FIRST_VERSION = "3:cpu,cpuacct:/a\n2:memory:/a"
FIRST_QUOTA, FIRST_PERIOD = "cpu/a/cpu.cfs_quota_us", "cpu/a/cpu.cfs_period_us"


@pytest.fixture
def allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have this process run on these processors of eight, two of which are threads of a core."""
    cpus = list(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(cpus))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(processors, "_CPUS", tmp_path / "cpus")
    for cpu in cpus:
        topology = tmp_path / "cpus" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu & ~1}-{cpu | 1}\n")
    return cpus


@pytest.mark.parametrize(
    ("cpus", "count"), [(range(8), None), ([0, 1, 2], 2), ([1, 3, 5], 3), ([6], 1)]
)
def test_it_is_a_thread_for_each_core_that_may_be_used(
    cpus: Sequence[int],
    count: int | None,
    allowed: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lay_groups(tmp_path, "0::/a", {"a/cpu.max": "max 100000"}, monkeypatch)
    allowed[:] = cpus
    assert limited_threads() == count
    (tmp_path / "own").unlink()
    assert limited_threads() == count


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "max 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "400000 100000"}, 3),
        ("0::/a", {"a/cpu.max": "1600000 100000"}, 4),  # of more processors than there are
        (FIRST_VERSION, {FIRST_QUOTA: "350000\n", FIRST_PERIOD: "100000\n"}, 3),
        (FIRST_VERSION, {FIRST_QUOTA: "-1\n", FIRST_PERIOD: "100000\n"}, None),
    ],
)
def test_control_groups_allow_less(
    groups: str,
    files: dict[str, str],
    count: int | None,
    allowed: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lay_groups(tmp_path, groups, files, monkeypatch)
    assert limited_threads() == count


@pytest.mark.parametrize(
    ("threads", "busy", "cpu_count", "fewer"),
    [
        (2, 0.4, 2, None),
        (2, 1.0, 2, 1),
        (1, 2.0, 2, None),
        (8, 4.0, 16, None),  # two threads of a core
        (8, 10.0, 16, 6),
    ],
)
def test_fewer_threads_are_better_where_others_work(
    threads: int, busy: float, cpu_count: int, fewer: int | None
) -> None:
    assert fewer_threads(threads, busy, cpu_count) == fewer


def test_the_work_of_others_is_what_neither_this_process_nor_its_child_does(
    allowed: list[int], tmp_path: Path
) -> None:
    now = 10.0
    stat = tmp_path / "stat"
    tick = os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu  9 9\n\ncpu1 {100 * tick} 0 0 900 7 0 0 0 50 50\nintr 1 2\n")
    work = OtherWork(stat, lambda: now)
    now = 10.1
    assert work.processor_count(0) is None, "too short to know"
    now = 12.0
    stat.write_text(f"cpu  9 9\ncpu1 {102 * tick} {1 * tick} 0 990 9 0 0 0 70 70\nintr 1 2\n")
    assert work.processor_count(0) == pytest.approx(1.5, abs=0.2)
    assert work.processor_count(1.0) == pytest.approx(1.0, abs=0.2)
    assert OtherWork(tmp_path / "none", lambda: now).processor_count(0) is None


def test_work_on_processors_that_this_process_may_not_use_does_not_count(
    allowed: list[int], tmp_path: Path
) -> None:
    allowed[:] = [1, 3]
    stat = tmp_path / "stat"
    now, tick = 0.0, os.sysconf("SC_CLK_TCK")

    def work_until(seconds: int) -> None:
        busy = [seconds, 0, seconds, seconds // 2, *[seconds] * 12]
        lines = [f"cpu{number} {count * tick} 0 0 0" for number, count in enumerate(busy)]
        stat.write_text("\n".join([f"cpu  {sum(busy) * tick} 0 0 0", *lines]))

    work_until(0)
    work = OtherWork(stat, lambda: now)
    now = 10.0
    work_until(10)
    assert work.processor_count(0) == pytest.approx(0.5, abs=0.1)
