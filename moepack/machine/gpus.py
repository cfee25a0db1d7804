"""NVIDIA GPUs, as their driver tells of them through nvidia-ml-py, an extra to be installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from moepack import extras
from moepack.machine.model import Figure, Gpu

_TRANSFERS = 2
"""A clock: all of their memory is double data rate, counted in the driver's clock."""


_LANES = {3: 985e6, 4: 1969e6, 5: 3938e6, 6: 7563e6}
"""Bytes a second of a lane of PCIe, by its generation."""


class Gpus(NamedTuple):
    """The GPUs that were found; `note` says why there is none, or what is not known of them."""

    found: tuple[Gpu, ...]
    note: str | None


def find_gpus() -> Gpus:
    """Ask the driver for all GPUs; where there is nobody to ask, there are none."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return _none(f"it takes nvidia-ml-py: `{extras.hint('gpu')}`")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _none(f"no NVIDIA driver answers ({error})")
    try:
        gpus = [_gpu(pynvml, handle) for handle in _handles(pynvml)]
    except pynvml.NVMLError as error:
        return _none(f"the NVIDIA driver fails ({error})")
    finally:
        pynvml.nvmlShutdown()
    if not gpus:
        return _none("the NVIDIA driver has none")
    known = tuple(gpu for gpu in gpus if gpu is not None)
    if len(known) < len(gpus):
        return Gpus(known, "the driver does not say how much memory a GPU has: type it by hand")
    return Gpus(known, None)


def _none(why: str) -> Gpus:
    return Gpus((), f"no GPU was found: {why}; others can be typed by hand")


def _handles(nvml: Any) -> Iterator[Any]:
    """Yield the driver's handle of each GPU, or of the instances that one is divided into (MIG)."""
    for number in range(nvml.nvmlDeviceGetCount()):
        whole = nvml.nvmlDeviceGetHandleByIndex(number)
        mode = _answer(nvml, nvml.nvmlDeviceGetMigMode, whole)
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            yield whole
            continue
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
            instance = _answer(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, whole, place)
            if instance is not None:
                yield instance


def _gpu(nvml: Any, handle: Any) -> Gpu | None:
    """Return what the driver says; None where it does not tell the memory."""
    memory = _answer(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None or not memory.total:
        return None
    name = _answer(nvml, nvml.nvmlDeviceGetName, handle)
    text = name.decode(errors="replace") if isinstance(name, bytes) else name
    clock = _answer(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM)
    bits = _answer(nvml, nvml.nvmlDeviceGetMemoryBusWidth, handle)
    bandwidth = _TRANSFERS * (clock or 0) * 10**6 * (bits or 0) / 8
    return Gpu(
        text if text and text.isprintable() else None,
        Figure(memory.total, "read"),
        Figure(bandwidth, "read") if bandwidth else None,
        _link(nvml, handle),
    )


def _link(nvml: Any, handle: Any) -> Figure | None:
    """Return what PCIe carries to a GPU: lanes, by what one of them does in its generation."""
    generation = _answer(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lane_count = _answer(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    lane = _LANES.get(generation)
    return Figure(lane * lane_count, "read") if lane and lane_count else None


def _answer(nvml: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return the driver's answer; None where it has none for such a GPU."""
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None
