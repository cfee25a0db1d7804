"""Variables that keep experts from being brought, or slow it down."""

import pytest

from moepack.diagnosis.options import check_variables
from moepack.machine.bandwidth import cpu_count


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("LLAMA_ARG_LOAD_MODE", "mlock", "problem"),
        ("LLAMA_ARG_LOAD_MODE", "mmap", "fine"),
        ("LLAMA_ARG_NO_MMAP", "1", "problem"),
        ("GGML_CUDA_REGISTER_HOST", "1", "problem"),
        ("OMP_WAIT_POLICY", "active", "limit"),
        ("OMP_WAIT_POLICY", "passive", "fine"),
        ("OMP_NUM_THREADS", str(cpu_count()), "fine"),
        ("HOME", "/root", "fine"),
    ],
)
def test_variables_that_get_in_the_way_are_named(name: str, value: str, verdict: str) -> None:
    finding = check_variables({name: value})
    assert finding.verdict == verdict
    assert (finding.hint is None) == (verdict == "fine")
    assert verdict == "fine" or name in (finding.measured or "")


def test_fewer_threads_than_processors_are_named() -> None:
    if cpu_count() == 1:
        pytest.skip("there is one processor alone")
    assert check_variables({"OMP_NUM_THREADS": "1"}).measured == "OMP_NUM_THREADS=1"
