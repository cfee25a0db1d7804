"""The speed of a pack in a store, as text for people."""

from moepack.bench.store_speed import StoreReads, StoreReport
from moepack.common.sizes import size_text
from moepack.report.page import Page
from moepack.report.table import Column, Table
from moepack.report.values import rate_text, seconds_text

_UNITS = {"expert": "whole experts", "part": "their parts"}
_COLUMNS = (
    Column("requests for", "l"),
    Column("in flight"),
    Column("experts/s"),
    Column("from"),
    Column("to"),
    Column("MiB/s"),
)


def text(report: StoreReport) -> Page:
    """Write the measurements, and the gain of one request for an expert."""
    expert = f"experts of {size_text(round(report.expert_length))}"
    return Page(
        f"{report.pack}: {expert} in {report.parts_per_expert:.3g} parts; a part alone takes "
        f"{seconds_text(report.part_seconds)}",
        "",
        Table(_COLUMNS, [_row(one) for one in report.readings]),
        "",
        f"one request for an expert, against one for each part: {_gain(report)}",
    )


def _row(reads: StoreReads) -> list[str]:
    return [
        _UNITS[reads.unit],
        f"{reads.depth}",
        rate_text(reads.experts_per_second),
        rate_text(reads.experts_per_second_lowest),
        rate_text(reads.experts_per_second_highest),
        f"{reads.bytes_per_second / (1 << 20):,.0f}",
    ]


def _gain(report: StoreReport) -> str:
    return ", ".join(
        f"{gain.ratio:.2f} × as many experts with {gain.depth} in flight" for gain in report.gains
    )
