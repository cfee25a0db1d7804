"""NVIDIA GPUs, as their driver reports them through nvidia-ml-py, an extra to be installed.

Of others is known whether there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moepack.common import extras

_TRANSFERS = 2
"""Transfers in a clock: all of their memory is double data rate, counted in the driver's clock."""
_LANES = {3: 985e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}
"""Bytes a second of a lane of PCIe, by its generation."""


_DEVICES = ("nvidia[0-9]*", "kfd", "dri/renderD*")
"""Files of drivers: NVIDIA's, AMD's for computing, and those of all others."""


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether a driver has a GPU here."""
    return any(any(devices.glob(pattern)) for pattern in _DEVICES)


class NvidiaGpu(NamedTuple):
    """A GPU: its memory in bytes, the bytes a second of that, and of the link to main memory."""

    name: str | None
    memory_length: int
    bandwidth: float | None
    link: float | None


def find_gpus() -> tuple[tuple[NvidiaGpu, ...], str | None]:
    """Return all GPUs that the driver reports, and a note if there is none, or a figure lacks."""
    none = "no GPU was found: {}; others can be typed by hand"
    try:
        import pynvml as nvml
    except ModuleNotFoundError:
        return (), none.format(f"it takes nvidia-ml-py: `{extras.hint('gpu')}`")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), none.format(f"no NVIDIA driver answers ({error})")
    try:
        gpus = [_gpu(nvml, handle) for handle in _handles(nvml)]
    except nvml.NVMLError as error:
        return (), none.format(f"the NVIDIA driver fails ({error})")
    finally:
        nvml.nvmlShutdown()
    if not gpus:
        return (), none.format("the NVIDIA driver has none")
    complete = tuple(gpu for gpu in gpus if gpu is not None)
    if len(complete) < len(gpus):
        return complete, "the driver does not say how much memory a GPU has: type it by hand"
    return complete, None


def _handles(nvml: Any) -> Iterator[Any]:
    """Yield the driver's handle of each GPU, or of the instances of a divided one (MIG)."""
    for number in range(nvml.nvmlDeviceGetCount()):
        whole = nvml.nvmlDeviceGetHandleByIndex(number)
        mode = _call(nvml, nvml.nvmlDeviceGetMigMode, whole)
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            yield whole
            continue
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
            instance = _call(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, whole, index)
            if instance is not None:
                yield instance


def _gpu(nvml: Any, handle: Any) -> NvidiaGpu | None:
    memory = _call(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None or not memory.total:
        return None
    text = _call(nvml, nvml.nvmlDeviceGetName, handle)
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    clock = _call(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM)
    bits = _call(nvml, nvml.nvmlDeviceGetMemoryBusWidth, handle)
    bandwidth = _TRANSFERS * (clock or 0) * 10**6 * (bits or 0) / 8
    lane = _LANES.get(_call(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle), 0.0)
    link = lane * (_call(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0)
    name = text if text and text.isprintable() else None
    return NvidiaGpu(name, memory.total, bandwidth or None, link or None)


def _call(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the driver's answer; None if it has none for such a GPU."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None
