"""How many threads may compute: processors, control groups, and the work of others."""

import os
from pathlib import Path

import pytest

from moepack.machine.processors import OtherWork, core_count, fewer_threads, limited_threads


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have this process run on these processors of eight."""
    cpus = list(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(cpus))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    return cpus


def groups(folder: Path, **quotas: str) -> tuple[Path, Path]:
    """Write control groups of the second version, each in the one before."""
    own = folder / "own"
    place = folder / "groups"
    for name, quota in quotas.items():
        place /= name
        place.mkdir(parents=True)
        (place / "cpu.max").write_text(f"{quota}\n")
    own.write_text(f"0::/{'/'.join(quotas)}\n")
    return own, folder / "groups"


def cores_of_two(folder: Path) -> Path:
    """Write which processors are threads of one core: 0 and 1, 2 and 3, and so on."""
    for cpu in range(8):
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu & ~1}-{cpu | 1}\n")
    return folder


def test_a_process_that_may_use_all_is_not_limited(allowed: list[int], tmp_path: Path) -> None:
    assert limited_threads(tmp_path, *groups(tmp_path, a="max 100000")) is None
    assert limited_threads(tmp_path, tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(("cpus", "count"), [([0, 1, 2], 2), ([1, 3, 5], 3), ([6], 1)])
def test_it_is_a_thread_for_each_core_that_may_be_used(
    cpus: list[int], count: int, allowed: list[int], tmp_path: Path
) -> None:
    allowed[:] = cpus
    cores = cores_of_two(tmp_path / "cpus")
    assert limited_threads(cores, *groups(tmp_path, a="max 100000")) == core_count(cores) == count


@pytest.mark.parametrize(
    ("inner", "outer", "count"),
    [
        ("max 100000", "250000 100000", 2),
        ("50000 100000", "max 100000", 1),
        ("300000 100000", "400000 100000", 3),
        ("max 100000", "1600000 100000", 8),  # of more processors than there are
    ],
)
def test_control_groups_allow_less(
    inner: str, outer: str, count: int, allowed: list[int], tmp_path: Path
) -> None:
    assert limited_threads(tmp_path, *groups(tmp_path, outer=outer, inner=inner)) == count


def test_a_quota_of_more_than_the_cores_gives_no_more_threads(
    allowed: list[int], tmp_path: Path
) -> None:
    cores = cores_of_two(tmp_path / "cpus")
    assert limited_threads(cores, *groups(tmp_path, a="1600000 100000")) == 4


def test_lines_that_name_no_control_group_are_passed_over(
    allowed: list[int], tmp_path: Path
) -> None:
    own, root = groups(tmp_path, a="300000 100000")
    own.write_text(f"nothing\n1:none\n\n{own.read_text()}")
    assert limited_threads(tmp_path, own, root) == 3


def test_control_groups_of_the_first_version_do_so_too(allowed: list[int], tmp_path: Path) -> None:
    (tmp_path / "own").write_text("3:cpu,cpuacct:/a\n2:memory:/a\n")
    folder = tmp_path / "groups" / "cpu" / "a"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("350000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert limited_threads(tmp_path, tmp_path / "own", tmp_path / "groups") == 3
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert limited_threads(tmp_path, tmp_path / "own", tmp_path / "groups") is None


@pytest.mark.parametrize(
    ("threads", "busy", "cpu_count", "fewer"),
    [
        (2, 0.0, 2, None),
        (2, 0.4, 2, None),
        (2, 1.0, 2, 1),
        (2, 5.0, 2, 1),
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
