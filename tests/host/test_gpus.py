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

from moepack.common import extras
from moepack.host import gpus
from moepack.host.gpus import NvidiaGpu, find_gpus
from tests.support.values import some

GIB = 1 << 30


class NVMLError(Exception):
    """An error of nvidia-ml-py."""


class Driver:
    """Answers for GPUs, each a dict of values, as nvidia-ml-py does."""

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
        if name.startswith("__"):  # Python 3.14 looks at what it imports
            raise AttributeError(name)
        assert self.is_open
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def answer(gpu: dict[str, Any], argument: int | None = None) -> Any:
            value: Any = gpu.get(name.removeprefix("nvmlDeviceGet"))
            if name.endswith("MaxClockInfo"):
                assert argument == self.NVML_CLOCK_MEM
            elif argument is not None:
                value = value[argument]
            if value is None:
                raise NVMLError("Not Supported")
            return value

        return answer


def gpus_by(driver: Driver | None) -> tuple[tuple[NvidiaGpu, ...], str | None]:
    """Return the GPUs that a driver answers for, or that are found without its module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", driver)
        return find_gpus()


def gpu(length: int | None, clock: int | None = None, bits: int | None = None) -> dict[str, Any]:
    """Return the driver's values of a GPU: bytes, MHz, bits."""
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
        *((8 * GIB, *pair, None) for pair in ((None, 384), (9751, None), (0, 384), (9751, 0))),
    ],
)
def test_the_bandwidth_is_that_of_data_sheets(
    length: int, clock: int | None, bits: int | None, bandwidth: float | None
) -> None:
    driver = Driver(gpu(length, clock, bits))
    (only,), note = gpus_by(driver)
    assert (only.name, only.memory_length) == (f"a GPU of {bits} bits", length)
    assert only.bandwidth == (bandwidth and pytest.approx(bandwidth, rel=0.001))
    assert note is None
    assert not driver.is_open


@pytest.mark.parametrize(
    ("generation", "lane_count", "link"),
    [(4, 16, 31.5e9), (5, 16, 63e9), (3, 4, 3.94e9), (None, 16, None), (9, 16, None)],
)
def test_the_link_is_what_its_lanes_carry(
    generation: int | None, lane_count: int, link: float | None
) -> None:
    values = {"MaxPcieLinkGeneration": generation, "MaxPcieLinkWidth": lane_count}
    (only,), _ = gpus_by(Driver(gpu(8 * GIB) | values))
    assert only.link == (link and pytest.approx(link, rel=0.01))


def test_a_name_may_be_bytes_and_has_to_be_text() -> None:
    several = [gpu(GIB) | {"Name": name} for name in (b"Tesla P40", "a\nb", None)]
    assert [one.name for one in gpus_by(Driver(*several))[0]] == ["Tesla P40", None, None]


def test_a_gpu_that_shares_its_memory_is_left_to_be_typed() -> None:
    complete, note = gpus_by(Driver(gpu(None), gpu(GIB)))
    assert [one.memory_length for one in complete] == [GIB]
    assert note == "the driver does not say how much memory a GPU has: type it by hand"


def test_of_a_divided_gpu_each_instance_counts() -> None:
    parts = [gpu(20 * GIB), gpu(10 * GIB)]
    whole = gpu(40 * GIB, 1215, 5120) | {
        "MigMode": [1, 1],
        "MaxMigDeviceCount": 3,
        "MigDeviceHandleByIndex": [parts[0], None, parts[1]],
    }
    undivided = gpu(40 * GIB, 1215, 5120) | {"MigMode": [0, 1]}
    instances, _ = gpus_by(Driver(whole, undivided))
    assert [one.memory_length for one in instances] == [20 * GIB, 10 * GIB, 40 * GIB]
    assert [one.bandwidth is None for one in instances] == [True, True, False]


def test_without_the_module_the_note_says_how_to_get_it() -> None:
    none, note = gpus_by(None)
    assert none == ()
    assert f"it takes nvidia-ml-py: `{extras.hint('gpu')}`" in some(note)


def test_a_driver_without_gpus_and_one_that_fails_are_told_apart() -> None:
    none, note = gpus_by(Driver())
    assert none == ()
    assert note == "no GPU was found: the NVIDIA driver has none; others can be typed by hand"

    class Failing(Driver):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise NVMLError("GPU is lost")

    driver = Failing()
    none, note = gpus_by(driver)
    assert none == ()
    assert "the NVIDIA driver fails (GPU is lost)" in (note or "")
    assert not driver.is_open


def test_the_real_module_has_all_that_the_driver_is_asked() -> None:
    nvml = pytest.importorskip("pynvml")
    names = set(re.findall(r"nvml\.(\w+)", Path(gpus.__file__).read_text()))
    assert len(names) >= 12
    assert all(hasattr(nvml, name) for name in names)
