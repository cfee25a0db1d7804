"""Summaries of pulls, planned or done."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moepack.common.digest_counts import DigestCounts
from moepack.pack.reading.pack import Pack
from moepack.packing.copies.packed_items import PackedItem, length_of
from moepack.packing.copies.present_items import PresentItems


@dataclass(frozen=True, slots=True)
class PullSummary:
    """The pack at `origin` as far as it is at `path` now; lengths are bytes.

    If it `is_whole`, it is that pack. Else `layers` are those with all their experts here, and
    `missing_layers` those without any. `kept_length` was there before, `fetched_length` came now,
    None if that is only planned. `mended_length` was there, damaged, and is right again. `digests`
    counts the bytes of parts that are here.
    """

    path: str
    origin: str
    is_whole: bool
    layers: tuple[int, ...]
    missing_layers: tuple[int, ...]
    expert_count: int
    all_expert_count: int
    length: int
    all_length: int
    kept_length: int
    fetched_length: int | None
    mended_length: int
    digests: DigestCounts


def summarise(
    pack: Pack,
    folder: Path,
    items: Sequence[PackedItem],
    present: PresentItems,
    *,
    is_whole: bool,
    kept_length: int,
    fetched_length: int | None,
    mended_length: int,
) -> PullSummary:
    """Return the summary of a pull of `pack` into `folder`, of whose `items` some are present."""
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for number, item in enumerate(items):
        if item.key is not None:
            counts[item.key[0]][0] += number in present.here
            counts[item.key[0]][1] += 1
    return PullSummary(
        path=os.fspath(folder),
        origin=str(pack.path),
        is_whole=is_whole,
        layers=tuple(layer for layer, (some, every) in counts.items() if some == every),
        missing_layers=tuple(layer for layer, (some, _) in counts.items() if not some),
        expert_count=sum(some for some, _ in counts.values()),
        all_expert_count=sum(every for _, every in counts.values()),
        length=length_of(items, present.here),
        all_length=length_of(items, range(len(items))),
        kept_length=kept_length,
        fetched_length=fetched_length,
        mended_length=mended_length,
        digests=DigestCounts(
            known_length=present.part_length(present.here),
            compared_length=present.part_length(present.compared),
        ),
    )
