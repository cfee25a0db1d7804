"""Measurements of `bench`, as text for people."""

import math
from collections.abc import Sequence

from moepack.bench.comparison import Schedule
from moepack.bench.run import BenchReport, MeasuredReads
from moepack.bench.verdict import Gain
from moepack.common.sizes import count_text, size_text
from moepack.report.machine_text import mib_text, surface
from moepack.report.page import Block, Page
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, rate_text, seconds_text

_LAYOUTS = {"blobs": "pack, blobs", "parts": "pack, parts", "slices": "shards"}
_WORDS = {
    "gain": "a gain",
    "loss": "a loss",
    "none": "neither is shown",
    "unproven": "too few rounds to tell",
}


def announced(schedule: Schedule) -> str:
    """Write the plan of the comparison."""
    seconds, rounds = schedule.total_seconds, count_text(schedule.round_count, "round")
    plan = (
        f"the comparison takes about {seconds_text(seconds)}, up to twice that if other programs "
        f"disturb it: {rounds}, each way with {size_text(schedule.portion_length)} of experts"
    )
    if schedule.seconds < schedule.needed_seconds:
        needed = schedule.needed_seconds
        plan += f"; a verdict takes more on this drive: --seconds {math.ceil(needed / 10) * 10}"
    return plan


def text(report: BenchReport) -> Page:
    """Write the whole report: tables, notes, and the verdict last."""
    blocks: list[Block] = [
        f"{report.pack}, {size_text(report.pack_length)}, read with {report.backend}"
    ]
    for order in dict.fromkeys(point.order for point in report.surface):
        blocks += ["", f"{order} reads, MiB/s by size and reads in flight"]
        points = [point for point in report.surface if point.order == order]
        blocks.append(surface(((p.length, p.depth, p.bytes_per_second) for p in points), indent=2))
    return Page(*blocks, "", *comparison(report), "", report.verdict)


def comparison(report: BenchReport) -> list[Block]:
    """Write the routed reads, the gain of the pack, and notes."""
    routing, buffers = report.routing, report.raw_buffers
    memory = f"{count_text(buffers.count, 'buffer')} of {size_text(buffers.length)}"
    huge = "unknown" if buffers.huge_page_share is None else f"{buffers.huge_page_share:.0%}"
    blocks: list[Block] = [
        f"routed reads: {_tokens(routing.token_count)}, "
        f"{count_text(routing.routed_layer_count, 'layer')}, "
        f"{size_text(routing.useful_length)} of experts ({routing.origin})",
        f"{count_text(report.round_count, 'round')}; raw and mapped reads go to {memory}, "
        f"in huge pages: {huge}",
        Table(_READS, _reads(report.readings)),
        "blobs are read whole, parts and the slices of shards one by one; ms/token: reading all "
        "experts that a token uses, with which a model has to compute as well",
    ]
    if report.gains:
        blocks += ["", "blobs of the pack, times as fast as slices of the shards (interval)"]
        blocks.append(Table(_GAINS, [_gain(gain) for gain in report.gains], indent=2))
    return [*blocks, *(f"note: {note}" for note in report.notes)]


_READS = (
    *(Column("", "l"), Column("", "l"), Column("depth"), Column("MiB/s"), Column("spread", rank=2)),
    *(Column("CPU s/GiB", rank=4), Column("reads/token", rank=3), Column("ms/token", rank=1)),
)
_GAINS = (Column("", "l"), Column(""), Column("", "l"), Column("", "l", rank=1))


def _tokens(count: float) -> str:
    """Write a number of tokens, the last of which may be a part."""
    return count_text(int(count), "token") if count == int(count) else f"{count:,.1f} tokens"


def _reads(readings: Sequence[MeasuredReads]) -> list[list[str]]:
    has_blobs = any(reads.layout == "parts" for reads in readings)
    names = _LAYOUTS if has_blobs else _LAYOUTS | {"blobs": "shards"}
    return [
        [
            names[reads.layout],
            f"{reads.way}, {reads.state}",
            str(reads.depth),
            mib_text(reads.bytes_per_second),
            f"{mib_text(reads.bytes_per_second_lowest)} to "
            f"{mib_text(reads.bytes_per_second_highest)}",
            f"{reads.cpu_seconds_per_gib:.3f}",
            f"{reads.reads_per_token:,.0f}",
            rate_text(reads.seconds_per_token * 1e3),
        ]
        for reads in readings
    ]


def _gain(gain: Gain) -> list[str]:
    numbers = UNKNOWN
    if gain.ratio is not None:
        numbers = f"{gain.ratio:.2f} ({gain.low:.2f} to {gain.high:.2f})"
    return [f"{gain.way}, {gain.state}", str(gain.depth), numbers, _WORDS[gain.word]]
