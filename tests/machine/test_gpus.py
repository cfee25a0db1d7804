"""NVIDIA GPUs. No GPU is needed: a small module stands in for the driver's, but in one test.

Its figures are those of data sheets, so that the arithmetic on clocks and widths is held against
the bandwidths that they state. What real drivers answer is not tested here.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moepack import extras
from moepack.machine import gpus
from moepack.machine.gpus import find_gpus
from moepack.machine.model import Figure, Gpu

GIB = 1 << 30


class NVMLError(Exception):
    """What nvidia-ml-py raises."""


class Driver:
    """Answers for GPUs, each a dict of what it knows, as nvidia-ml-py does."""

    NVML_CLOCK_MEM = 2
    NVML_DEVICE_MIG_ENABLE = 1
    NVMLError = NVMLError

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = gpus
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802  # its name
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> dict[str, Any]:  # noqa: N802
        return self.gpus[number]

    def __getattr__(self, name: str) -> Any:
        assert self.is_open
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def answer(gpu: dict[str, Any], argument: int | None = None) -> Any:
            known: Any = gpu.get(name.removeprefix("nvmlDeviceGet"))
            if name.endswith("MaxClockInfo"):
                assert argument == self.NVML_CLOCK_MEM
            elif argument is not None:
                known = known[argument]
            if known is None:
                raise NVMLError("Not Supported")
            return known

        return answer


def gpu(length: int | None, clock: int | None = None, bits: int | None = None) -> dict[str, Any]:
    """Return what the driver knows of a GPU: bytes, MHz, bits."""
    return {
        "Name": f"a GPU of {bits} bits",
        "MemoryInfo": length and SimpleNamespace(total=length),
        "MaxClockInfo": clock,
        "MemoryBusWidth": bits,
    }


@pytest.mark.parametrize(
    ("length", "clock", "bits", "bandwidth"),
    [
        (24 * GIB, 9751, 384, 936e9),  # RTX 3090, GDDR6X
        (32 * GIB, 14001, 512, 1792e9),  # RTX 5090, GDDR7
        (12 * GIB, 7501, 192, 360e9),  # RTX 3060, GDDR6
        (40 * GIB, 1215, 5120, 1555e9),  # A100 40 GB, HBM2
    ],
)
def test_the_bandwidth_is_that_of_data_sheets(
    length: int, clock: int, bits: int, bandwidth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(gpu(length, clock, bits))
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    (found,), note = find_gpus()
    assert found.name == f"a GPU of {bits} bits"
    assert found.memory == Figure(length, "read")
    assert found.bandwidth is not None
    assert found.bandwidth.basis == "read"
    assert found.bandwidth.value == pytest.approx(bandwidth, rel=0.001)
    assert note is None
    assert not driver.is_open


@pytest.mark.parametrize(
    ("generation", "lane_count", "link"),
    [(4, 16, 31.5e9), (5, 16, 63e9), (3, 4, 3.94e9), (None, 16, None), (9, 16, None)],
)
def test_the_link_is_what_its_lanes_carry(
    generation: int | None, lane_count: int, link: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"MaxPcieLinkGeneration": generation, "MaxPcieLinkWidth": lane_count}
    monkeypatch.setitem(sys.modules, "pynvml", Driver(gpu(8 * GIB) | known))
    (found,), _ = find_gpus()
    assert (found.link and found.link.value) == (link and pytest.approx(link, rel=0.01))


@pytest.mark.parametrize(("clock", "bits"), [(None, 384), (9751, None), (0, 384), (9751, 0)])
def test_without_clock_or_width_the_bandwidth_is_not_known(
    clock: int | None, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(gpu(8 * GIB, clock, bits)))
    assert find_gpus().found[0].bandwidth is None


def test_a_name_may_be_bytes_and_has_to_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [gpu(GIB) | {"Name": name} for name in (b"Tesla P40", "a\nb", None)]
    monkeypatch.setitem(sys.modules, "pynvml", Driver(*several))
    assert [found.name for found in find_gpus().found] == ["Tesla P40", None, None]


def test_a_gpu_that_shares_its_memory_is_left_to_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(gpu(None), gpu(GIB)))
    found, note = find_gpus()
    assert [one.memory.value for one in found] == [GIB]
    assert note == "the driver does not say how much memory a GPU has: type it by hand"


def test_of_a_divided_gpu_each_instance_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [gpu(20 * GIB), gpu(10 * GIB)]
    whole = gpu(40 * GIB, 1215, 5120) | {
        "MigMode": [1, 1],
        "MaxMigDeviceCount": 3,
        "MigDeviceHandleByIndex": [parts[0], None, parts[1]],
    }
    undivided = gpu(40 * GIB, 1215, 5120) | {"MigMode": [0, 1]}
    monkeypatch.setitem(sys.modules, "pynvml", Driver(whole, undivided))
    found, _ = find_gpus()
    assert [one.memory.value for one in found] == [20 * GIB, 10 * GIB, 40 * GIB]
    assert [one.bandwidth is None for one in found] == [True, True, False]


def test_without_the_module_the_note_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found, note = find_gpus()
    assert found == ()
    assert note is not None
    assert f"it takes nvidia-ml-py: `{extras.hint('gpu')}`" in note


def test_a_driver_without_gpus_and_one_that_fails_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    none: tuple[Gpu, ...] = ()
    assert find_gpus() == (
        none,
        "no GPU was found: the NVIDIA driver has none; others can be typed by hand",
    )

    class Failing(Driver):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise NVMLError("GPU is lost")

    driver = Failing()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    found, note = find_gpus()
    assert found == ()
    assert "the NVIDIA driver fails (GPU is lost)" in (note or "")
    assert not driver.is_open


def test_the_real_module_has_all_that_the_driver_is_asked() -> None:
    nvml = pytest.importorskip("pynvml")
    asked = set(re.findall(r"nvml\.(\w+)", Path(gpus.__file__).read_text()))
    assert len(asked) >= 12
    assert not {name for name in asked if not hasattr(nvml, name)}


def test_the_real_module_answers_or_says_that_there_is_no_driver() -> None:
    """Whatever machine this is."""
    nvml = pytest.importorskip("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        found, note = find_gpus()
        assert found == ()
        assert "no NVIDIA driver answers" in (note or "")
        return
    nvml.nvmlShutdown()
    assert all(gpu.memory.value > 0 for gpu in find_gpus().found)
