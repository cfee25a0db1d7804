"""Checks of memory, processors, GPUs, variables and the drive."""

import os
from pathlib import Path

import pytest

from moepack.bench.diagnosis import hardware
from moepack.bench.diagnosis.hardware import check_drive, check_variables
from moepack.host.processors import cpu_count
from moepack.planning.machine.model import Figure, Gpu
from tests.support.machines import GB, surface
from tests.support.needs import needs_llama

AVX2 = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | FMA = 1 | AVX512 = 0 | OPENMP = 1 | REPACK = 1 | "


def test_a_control_group_that_leaves_less_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "limited_memory", lambda: 700 << 20)
    finding = hardware.check_free_memory()
    assert (finding.measured or "").endswith("; a control group allows 700.0 MiB")
    assert finding.verdict == "limit"


@pytest.mark.parametrize(("share", "verdict"), [("0.00", "fine"), ("34.10", "limit")])
def test_who_waits_for_memory_is_seen(tmp_path: Path, share: str, verdict: str) -> None:
    """As psi.rst of the kernel has it."""
    path = tmp_path / "memory"
    path.write_text(
        f"some avg10={share} avg60=1.00 avg300=0.20 total=7\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    assert hardware.check_pressure(path).verdict == verdict
    assert hardware.check_pressure(tmp_path / "none").measured is None


def test_bandwidth_that_others_use_and_several_nodes_are_limits(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    steady = Figure(40 * GB, "measured", 38 * GB, 41 * GB)
    assert hardware.check_bandwidth(steady, tmp_path).verdict == "fine"
    busy = hardware.check_bandwidth(steady._replace(lowest=12 * GB), tmp_path)
    assert (busy.verdict, busy.measured) == ("limit", "37.3 GiB/s (11.2 GiB/s to 38.2 GiB/s)")
    (tmp_path / "node1").mkdir()
    assert "numactl" in (hardware.check_bandwidth(steady, tmp_path).hint or "")
    assert hardware.check_bandwidth(None).verdict == "unknown"


def test_others_that_compute_are_named() -> None:
    if cpu_count() < (os.cpu_count() or 1):
        pytest.skip("not all processors are ours")
    finding = hardware.check_processors(None, cpu_count() * 0.9, None)
    assert (finding.verdict, (finding.measured or "")[-8:]) == ("limit", "are busy")


def test_a_build_for_less_than_this_processor_is_named() -> None:
    finding = hardware.check_build(AVX2, {"avx2", "avx512f", "avx512_vnni", "sse2"})
    assert finding.verdict == "limit"
    assert (finding.measured or "").endswith("built for AVX2; this one has AVX512, AVX512_VNNI")
    assert hardware.check_build(AVX2, {"avx2", "fma"}).verdict == "fine"
    assert hardware.check_build(AVX2, set()).verdict == "unknown"


@needs_llama
def test_the_build_here_says_what_it_was_built_for() -> None:
    assert "built for " in (hardware.check_build().measured or "")


def test_gpus_are_named_and_why_there_is_none() -> None:
    gpu = Gpu("RTX 3090", Figure(24 << 30, "read"), None)
    assert hardware.check_gpus([gpu], None).measured == "RTX 3090, 24.0 GiB"
    none = hardware.check_gpus([], "no GPU was found: why")
    assert (none.measured, none.hint) == (None, "no GPU was found: why")


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("LLAMA_ARG_LOAD_MODE", "mlock", "problem"),
        ("LLAMA_ARG_LOAD_MODE", "mmap", "fine"),
        ("GGML_CUDA_REGISTER_HOST", "1", "problem"),
        ("OMP_WAIT_POLICY", "active", "limit"),
        ("HOME", "/root", "fine"),
    ],
)
def test_variables_that_get_in_the_way_are_named(name: str, value: str, verdict: str) -> None:
    finding = check_variables({name: value})
    assert finding.verdict == verdict
    assert (finding.hint is None) == (verdict == "fine")
    assert verdict == "fine" or name in (finding.measured or "")


@pytest.mark.parametrize(
    ("low", "high", "sequential", "verdict", "word"),
    [
        (3, 3.2, 3.3, "fine", ""),
        (1, 1.2, 3.3, "limit", "longer reads"),
        (0.1, 0.12, 0.15, "limit", "NVMe"),
        (1, 3, 3.3, "limit", "throttled"),
    ],
)
def test_what_slows_reads_is_named(
    low: float, high: float, sequential: float | None, verdict: str, word: str
) -> None:
    figure = None if sequential is None else Figure(sequential * GB, "measured")
    drive = surface({(2 << 20, 4): (low, high)})._replace(sequential=figure)
    finding = check_drive(drive, None)
    assert finding.verdict == verdict
    assert word in (finding.hint or "")
    assert ("in order" in (finding.measured or "")) == (sequential is not None)
