"""Memory: what is free of what, whether others wait for it, how fast it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from moepack.bench.control_group import control_group
from moepack.diagnosis import memory
from moepack.machine.model import Figure
from tests.support.machines import GB

LIMIT = 700 << 20
CHECK = "from moepack.diagnosis.memory import check_free_memory as check; print(check())"


def test_what_is_free_is_said() -> None:
    finding = memory.check_free_memory()
    assert " may be taken of " in (finding.measured or "")


def test_a_control_group_that_leaves_less_is_the_limit() -> None:
    with control_group(LIMIT) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        command = group.command([sys.executable, "-c", CHECK])
        end = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "a control group allows 700.0 MiB" in end.stdout
    assert "verdict='limit'" in end.stdout


@pytest.mark.parametrize(("share", "verdict"), [("0.00", "fine"), ("34.10", "limit")])
def test_who_waits_for_memory_is_seen(tmp_path: Path, share: str, verdict: str) -> None:
    """As psi.rst of the kernel has it."""
    path = tmp_path / "memory"
    path.write_text(
        f"some avg10={share} avg60=1.00 avg300=0.20 total=7\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    assert memory.check_pressure(path).verdict == verdict
    assert memory.check_pressure(tmp_path / "none").measured is None


def test_bandwidth_that_others_use_and_several_nodes_are_limits(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    steady = Figure(40 * GB, "measured", 38 * GB, 41 * GB)
    assert memory.check_bandwidth(steady, tmp_path).verdict == "fine"
    busy = memory.check_bandwidth(steady._replace(lowest=12 * GB), tmp_path)
    assert (busy.verdict, busy.measured) == ("limit", "37.3 GiB/s (11.2 GiB/s to 38.2 GiB/s)")
    (tmp_path / "node1").mkdir()
    assert "numactl" in (memory.check_bandwidth(steady, tmp_path).hint or "")
    assert memory.check_bandwidth(None).verdict == "unknown"
