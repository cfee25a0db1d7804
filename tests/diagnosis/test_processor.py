"""Processors: how many, how busy, with which build of llama.cpp; and GPUs."""

import os

import pytest

from moepack.diagnosis import processor
from moepack.machine.bandwidth import cpu_count
from moepack.machine.model import Figure, Gpu
from tests.support.machines import GB
from tests.support.needs import needs_llama
from tests.support.reads import in_child

AVX2 = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | FMA = 1 | AVX512 = 0 | OPENMP = 1 | REPACK = 1 | "


def test_processors_that_are_free_are_fine() -> None:
    finding = processor.check_processors(Figure(245 * GB, "measured"), 0.0, None)
    assert "245 GFLOP/s" in (finding.measured or "")
    assert finding.verdict in ("fine", "limit"), "the test itself may not have them all"


def test_others_that_compute_are_named() -> None:
    if cpu_count() < (os.cpu_count() or 1):
        pytest.skip("not all processors are ours")
    finding = processor.check_processors(None, cpu_count() * 0.9, None)
    assert (finding.verdict, (finding.measured or "")[-8:]) == ("limit", "are busy")


def test_a_quota_is_named() -> None:
    finding = processor.check_processors(None, 0.0, 0.5)
    assert "a control group allows 0.5 of them" in (finding.measured or "")
    finding = processor.check_processors(None, 0.0, float(cpu_count()))
    assert "control group" not in (finding.measured or "")


def test_processors_that_this_process_may_not_use_are_named() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor alone")

    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        finding = processor.check_processors(None, 0.0, None)
        assert (finding.measured or "").startswith("1 thread; the machine has ")
        assert finding.verdict == "limit"

    in_child(work)


def test_a_build_for_less_than_this_processor_is_named() -> None:
    finding = processor.check_build(AVX2, {"avx2", "avx512f", "avx512_vnni", "sse2"})
    assert finding.verdict == "limit"
    assert (finding.measured or "").endswith("built for AVX2; this one has AVX512, AVX512_VNNI")
    assert processor.check_build(AVX2, {"avx2", "fma"}).verdict == "fine"
    assert processor.check_build(AVX2, set()).verdict == "unknown"


@needs_llama
def test_the_build_here_says_what_it_was_built_for() -> None:
    assert "built for " in (processor.check_build().measured or "")


def test_gpus_are_named_and_why_there_is_none() -> None:
    gpu = Gpu("RTX 3090", Figure(24 << 30, "read"), None)
    assert processor.check_gpus([gpu], []).measured == "RTX 3090, 24.0 GiB"
    none = processor.check_gpus([], ["the drive is slow", "no GPU was found: why"])
    assert (none.measured, none.hint) == (None, "no GPU was found: why")
