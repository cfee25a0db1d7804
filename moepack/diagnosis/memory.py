"""How much memory is free, what keeps it from being more, and how fast it is."""

from __future__ import annotations

from pathlib import Path

from moepack.diagnosis.finding import Finding
from moepack.machine.memory_limits import (
    MOST_STALLED,
    PRESSURE,
    available_memory,
    limited_memory,
    stalled_percent,
    system_memory,
)
from moepack.machine.model import STEADY, Figure
from moepack.sizes import size_text, speed_text

_LITTLE = 0.25
"""Of all memory: with less of it free, something else has the rest."""
_NODES = Path("/sys/devices/system/node")


def check_free_memory() -> Finding:
    """Compare what this process may still take with what the machine has."""
    total, limit, available = system_memory(), limited_memory(), available_memory()
    most = total if limit is None else min(total, limit)
    measured = f"{size_text(available)} may be taken of {size_text(total)}"
    if limit is not None and limit < total:
        measured += f"; a control group allows {size_text(limit)}"
        hint = "give the container or service more (memory.max)"
        return Finding("memory", measured, "limit", hint)
    if available < _LITTLE * most:
        hint = "end what takes the rest: experts in memory are not read again"
        return Finding("memory", measured, "limit", hint)
    return Finding("memory", measured, "fine")


def check_pressure(path: Path = PRESSURE) -> Finding:
    """Look whether anything waited for memory in the last ten seconds (PSI)."""
    percent = stalled_percent(path)
    if percent is None:
        return Finding("memory pressure", None, "unknown")
    measured = f"something waited for memory in {percent:.0f} % of the last ten seconds"
    if percent <= MOST_STALLED:  # beyond, `run` gives memory back
        return Finding("memory pressure", measured, "fine")
    hint = (
        "another program takes memory now: end it, or give the model less: "
        "`moepack run MODEL --memory SIZE`"
    )
    return Finding("memory pressure", measured, "limit", hint)


def check_bandwidth(bandwidth: Figure | None, nodes: Path = _NODES) -> Finding:
    """Judge what all processors together read of memory."""
    if bandwidth is None:
        hint = "too little memory is free to measure it"
        return Finding("memory bandwidth", None, "unknown", hint)
    measured = speed_text(bandwidth.value)
    if (bandwidth.spread or 1.0) > STEADY:
        ends = f" ({speed_text(bandwidth.lowest or 0)} to {speed_text(bandwidth.highest or 0)})"
        hint = "others use the memory as well: tokens take longer meanwhile"
        return Finding("memory bandwidth", measured + ends, "limit", hint)
    node_count = len(list(nodes.glob("node[0-9]*")))
    if node_count > 1:
        measured += f", of {node_count} nodes together"
        hint = "start with `numactl --interleave=all`, so that no node is asked alone"
        return Finding("memory bandwidth", measured, "limit", hint)
    return Finding("memory bandwidth", measured, "fine")
