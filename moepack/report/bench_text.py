"""What `bench` measured, as text for people."""

import math
from collections.abc import Sequence

from moepack.bench.pace import Schedule
from moepack.bench.report import BenchReport, MeasuredReads, SurfacePoint
from moepack.bench.verdict import Gain
from moepack.sizes import count_text, size_text

_LAYOUTS = {
    "blobs": "pack, whole blobs",
    "parts": "pack, part by part",
    "slices": "shards, slice by slice",
}
_WORDS = {
    "gain": "a gain",
    "loss": "a loss",
    "none": "neither is shown",
    "unproven": "too few rounds to tell",
}


def announced(schedule: Schedule) -> str:
    """Write what is going to be done."""
    seconds, rounds = schedule.total_seconds, count_text(schedule.round_count, "round")
    said = (
        f"the comparison takes about {seconds:.0f} s, up to twice that where others disturb it: "
        f"{rounds}, each way with {size_text(schedule.portion_length)} of experts"
    )
    if schedule.seconds < schedule.needed_seconds:
        needed = schedule.needed_seconds
        said += f"; a verdict takes more on this drive: --seconds {math.ceil(needed / 10) * 10}"
    return said


def text(report: BenchReport) -> str:
    """Write the whole report: tables, notes, and the verdict last."""
    lines = [f"{report.pack}, {size_text(report.pack_length)}, read with {report.backend}"]
    for order in dict.fromkeys(point.order for point in report.surface):
        lines += ["", f"{order} reads, MiB/s by size and reads in flight"]
        lines += _surface([point for point in report.surface if point.order == order])
    routing, buffers = report.routing, report.raw_buffers
    held = f"{count_text(buffers.count, 'buffer')} of {size_text(buffers.length)}"
    huge = "unknown" if buffers.huge_page_share is None else f"{buffers.huge_page_share:.0%}"
    lines += [
        "",
        f"routed reads: {_tokens(routing.token_count)}, "
        f"{count_text(routing.routed_layer_count, 'layer')}, "
        f"{size_text(routing.useful_length)} of experts ({routing.origin})",
        f"{count_text(report.round_count, 'round')}; raw and mapped reads go to {held}, "
        f"in huge pages: {huge}",
        f"  {'':<22} {'':<12} {'depth':>5} {'MiB/s':>7} {'(spread)':>15} "
        f"{'CPU s/GiB':>9} {'reads/token':>11} {'ms/token':>9} {'tok/s':>7}",
    ]
    lines += [_reads(reads) for reads in report.readings]
    if report.gains:
        lines += ["", "blobs of the pack, times as fast as slices of the shards (interval)"]
        lines += [_gain(gain) for gain in report.gains]
    lines += [*(f"note: {note}" for note in report.notes), "", report.verdict]
    return "\n".join(lines)


def _tokens(count: float) -> str:
    """Write how many tokens were read; the last one may be a part."""
    return count_text(int(count), "token") if count == int(count) else f"{count:,.1f} tokens"


def _surface(points: Sequence[SurfacePoint]) -> list[str]:
    speeds = {(point.length, point.depth): point.bytes_per_second for point in points}
    lengths = sorted({point.length for point in points})
    depths = sorted({point.depth for point in points})
    lines = ["  " + " " * 10 + "".join(f"{depth:>7}" for depth in depths)]
    for length in lengths:
        cells = [speeds.get((length, depth)) for depth in depths]
        row = "".join(" " * 7 if cell is None else f"{cell / (1 << 20):>7.0f}" for cell in cells)
        lines.append(f"  {size_text(length):>10}{row}")
    return lines


def _reads(reads: MeasuredReads) -> str:
    speeds = (reads.bytes_per_second, reads.bytes_per_second_lowest, reads.bytes_per_second_highest)
    median, lowest, highest = (speed / (1 << 20) for speed in speeds)
    return (
        f"  {_LAYOUTS[reads.layout]:<22} {f'{reads.way}, {reads.state}':<12} "
        f"{reads.depth:>5} {median:>7.0f} {f'({lowest:.0f} to {highest:.0f})':>15} "
        f"{reads.cpu_seconds_per_gib:>9.3f} {reads.reads_per_token:>11.0f} "
        f"{reads.seconds_per_token * 1e3:>9.1f} {1 / reads.seconds_per_token:>7.1f}"
    )


def _gain(gain: Gain) -> str:
    numbers = "–"
    if gain.ratio is not None:
        numbers = f"{gain.ratio:.2f} ({gain.low:.2f} to {gain.high:.2f})"
    return f"  {f'{gain.way}, {gain.state}':<12} {gain.depth:>5}  {numbers:<22} {_WORDS[gain.word]}"
