"""What a drive does with reads of experts, against what it does in order."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.diagnosis.finding import Finding
from moepack.machine.model import STEADY, Drive
from moepack.sizes import size_text, speed_text

_DEPTH = 4
_SLOW = 0.5e9
"""Bytes a second: below, a token of most models takes seconds."""
_LITTLE = 0.6
"""Of reads in order: what random ones should reach at least."""


def check_drive(drive: Drive | None, notes: Sequence[str]) -> Finding:
    """Judge random reads as long as experts. `notes` say why there are none."""
    if drive is None or not drive.reads:
        reason = next((note for note in notes if "drive" in note), None)
        return Finding("drive", None, "unknown", reason)
    length = max(read.length for read in drive.reads)
    speed = drive.speed(length, _DEPTH)
    measured = f"{speed_text(speed.value)} in random reads of {size_text(length)}"
    if drive.sequential is not None:
        measured += f", {speed_text(drive.sequential.value)} in order"
    if (speed.spread or 1.0) > STEADY:
        hint = "the drive is shared, throttled or hot: it was much faster a moment before"
        return Finding("drive", measured, "limit", hint)
    if speed.value < _SLOW:
        hint = "move the model to a faster drive (NVMe)"
        return Finding("drive", measured, "limit", hint)
    if drive.sequential is not None and speed.value < _LITTLE * drive.sequential.value:
        hint = "longer reads help: a pack has one read for an expert; `moepack bench` measures it"
        return Finding("drive", measured, "limit", hint)
    return Finding("drive", measured, "fine")
