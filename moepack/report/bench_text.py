"""How the command line writes what `bench` measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from moepack.sizes import size_text

SMALL = 1 << 30
"""Bytes of a pack below which a drive's own memory may hold much of it."""

_LAYOUTS = {
    "blobs": "pack, whole blobs",
    "parts": "pack, part by part",
    "slices": "shards, slice by slice",
}


def text(facts: Mapping[str, Any]) -> str:
    """Write the whole result of `bench`: tables, notes, and the verdict last."""
    lines = [f"{facts['pack']}, {size_text(facts['pack_length'])}, read with {facts['backend']}"]
    for order in dict.fromkeys(point["order"] for point in facts["surface"]):
        lines += ["", f"{order} reads, MiB/s by size and reads in flight"]
        lines += _surface([point for point in facts["surface"] if point["order"] == order])
    routing = facts["routing"]
    lines += [
        "",
        f"routed reads: {routing['token_count']:.1f} tokens, {routing['step_count']} steps, "
        f"{size_text(routing['useful_length'])} of experts ({routing['origin']})",
        f"  {'':<22} {'':<12} {'depth':>5} {'MiB/s':>7} {'(spread)':>15} "
        f"{'CPU s/GiB':>9} {'reads/token':>11} {'ms/token':>9}",
    ]
    lines += [_reading(reading) for reading in facts["readings"]]
    lines += [*(f"note: {note}" for note in notes(facts)), "", facts["verdict"]]
    return "\n".join(lines)


def notes(facts: Mapping[str, Any]) -> list[str]:
    """Say what keeps these numbers from meaning what they seem to."""
    found = []
    if facts["cold_is_assured"] is None:
        found.append("this system does not tell what is cached: `cold` is not assured")
    elif not facts["cold_is_assured"]:
        found.append("files stayed in the page cache when asked to leave it: `cold` is not cold")
    if facts["backend"] == "buffered":
        found.append("no direct reads here: `direct` went through the page cache as well")
    if facts["pack_length"] < SMALL:
        found.append("a small pack: a drive's own memory may hold much of it")
    return found


def _surface(points: Sequence[Mapping[str, Any]]) -> list[str]:
    speeds = {(point["length"], point["depth"]): point["bytes_per_second"] for point in points}
    lengths, depths = (sorted({key[axis] for key in speeds}) for axis in (0, 1))
    lines = ["  " + " " * 10 + "".join(f"{depth:>7}" for depth in depths)]
    for length in lengths:
        cells = [speeds.get((length, depth)) for depth in depths]
        row = "".join(" " * 7 if cell is None else f"{cell / (1 << 20):>7.0f}" for cell in cells)
        lines.append(f"  {size_text(length):>10}{row}")
    return lines


def _reading(reading: Mapping[str, Any]) -> str:
    median, lowest, highest = (
        reading[f"bytes_per_second{name}"] / (1 << 20) for name in ("", "_lowest", "_highest")
    )
    return (
        f"  {_LAYOUTS[reading['layout']]:<22} {reading['way'] + ', ' + reading['state']:<12} "
        f"{reading['depth']:>5} {median:>7.0f} {f'({lowest:.0f} to {highest:.0f})':>15} "
        f"{reading['cpu_seconds_per_gib']:>9.3f} {reading['reads_per_token']:>11.0f} "
        f"{reading['seconds_per_token'] * 1e3:>9.1f}"
    )
