"""Measurements of `bench`, as text for people."""

from moepack.bench.run import BenchReport, MeasuredReads
from moepack.bench.verdict import Gain
from moepack.common.sizes import count_text, size_text
from moepack.report.machine_text import mib_text, surface
from moepack.report.page import Block, Page
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, rate_text

_LAYOUTS = {"blobs": "pack", "slices": "shards"}
_WORDS = {"gain": "pack faster", "loss": "shards faster", "none": "no difference shown"}


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
    routing = report.routing
    blocks: list[Block] = [
        f"routed reads: {_tokens(routing.token_count)}, "
        f"{count_text(routing.routed_layer_count, 'layer')}, "
        f"{size_text(routing.useful_length)} of experts ({routing.origin})",
        f"{count_text(report.round_count, 'round')}, with moepack's reader",
        Table(_READS, [_reads(one) for one in report.readings]),
        "blobs are read whole, the slices of shards one by one; ms/token: reading all experts that "
        "a token uses, with which a model has to compute as well",
    ]
    if report.gains:
        blocks += ["", "blobs of the pack, times as fast as slices of the shards (quartiles)"]
        blocks.append(Table(_GAINS, [_gain(gain) for gain in report.gains], indent=2))
    return [*blocks, *(f"note: {note}" for note in report.notes)]


_READS = (
    *(Column("", "l"), Column("depth"), Column("MiB/s"), Column("spread", rank=2)),
    *(Column("CPU s/GiB", rank=4), Column("reads/token", rank=3), Column("ms/token", rank=1)),
)
_GAINS = (Column("depth"), Column("", "l"), Column("", "l", rank=1))


def _tokens(count: float) -> str:
    """Write a number of tokens, the last of which may be a part."""
    return count_text(int(count), "token") if count == int(count) else f"{count:,.1f} tokens"


def _reads(reads: MeasuredReads) -> list[str]:
    return [
        _LAYOUTS[reads.layout],
        str(reads.depth),
        mib_text(reads.bytes_per_second),
        f"{mib_text(reads.bytes_per_second_lowest)} to {mib_text(reads.bytes_per_second_highest)}",
        f"{reads.cpu_seconds_per_gib:.3f}",
        f"{reads.reads_per_token:,.0f}",
        rate_text(reads.seconds_per_token * 1e3),
    ]


def _gain(gain: Gain) -> list[str]:
    if gain.ratio is None:
        return [str(gain.depth), UNKNOWN, "too few rounds to tell"]
    return [str(gain.depth), str(gain), _WORDS[gain.word]]
