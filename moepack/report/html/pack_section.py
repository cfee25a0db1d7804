"""The section about a pack: each blob in its file, from the hottest to the coldest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.common.escaping import one_line
from moepack.common.sizes import count_text, divide_up, size_text
from moepack.inspection.facts import PackFacts
from moepack.inspection.listing import BlobRow
from moepack.report.html.drawing import draw
from moepack.report.html.facts import ReportFacts
from moepack.report.html.maps import colours, map_symbol
from moepack.report.html.section import DataTable, MissingSection, PageSection, Picture, Ramp
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, length_text, share_text

TITLE = "The map of the pack"
_NAME = "blob-map"
_MAX_COLUMNS = 512
_TICKS = 10


class BlobMap(NamedTuple):
    """The blobs of each file by offset, a cell each, in rows of up to `width`.

    `files` has the name and the blobs of each file, `starts` the first row of each.
    """

    files: tuple[tuple[str, tuple[BlobRow, ...]], ...]
    width: int
    starts: tuple[int, ...]
    row_count: int

    def levels(self) -> NDArray[np.float64]:
        """Return how hot each cell is [rows, columns]: 1 for rank 0, not a number without blob."""
        cells = np.full((self.row_count, self.width), np.nan)
        last = max(1, max(blob.rank for _, blobs in self.files for blob in blobs))
        for start, (_, blobs) in zip(self.starts, self.files, strict=True):
            ranks = np.array([blob.rank for blob in blobs])
            cells[start:].reshape(-1)[: len(ranks)] = 1 - ranks / last
        return cells


def pack_section(facts: ReportFacts) -> PageSection | MissingSection:
    """Draw the blobs of a pack by file, the hottest brightest."""
    model = facts.model
    if not isinstance(model, PackFacts):
        reason = "a GGUF has no blobs: the parts of an expert lie apart in its shards; "
        return MissingSection(TITLE, reason + "`moepack pack MODEL -o MODEL.moepack` makes a pack")
    placed = [blob for blob in facts.blobs if blob.path is not None]
    if not placed:
        reason = "an index has no blobs: the parts of an expert lie apart in the shards; "
        return MissingSection(TITLE, reason + "`moepack pack MODEL -o MODEL.moepack` makes a pack")
    blob_map = lay_out(placed)
    is_measured = any(blob.hotness is not None for blob in placed)
    order = "the hottest first" if model.order == "hotness" else "in the order of the source"
    count = count_text(len(placed), "blob")
    coldest = "coldest" if is_measured else "last"
    hottest = "hottest" if is_measured else "first"
    each = " in each" if len(blob_map.files) > 1 else ""
    text = f"{count} in {count_text(len(blob_map.files), 'file')}, {order}{each}"
    figure = Picture(
        "blobs",
        "Blobs by file and offset, coloured by rank",
        f"A row of cells for each file, a cell for each blob: {text}. "
        f"The table has the same by file.",
        _picture(blob_map),
        ramp=Ramp(colours(), f"{coldest} of the pack", f"{hottest} of the pack"),
        pointer=_pointer(blob_map),
    )
    unknown: tuple[str, ...] = ()
    if not is_measured:
        unknown = ("The hotness of this pack was not measured: ranks are the order of the source.",)
    return PageSection(
        name="pack",
        title=TITLE,
        sentence=f"{text[0].upper()}{text[1:]}: one aligned read brings one expert.",
        figures=(figure,),
        tables=(_files(blob_map), _lengths(model)),
        unknown=unknown,
        symbols=(map_symbol(_NAME, blob_map.levels()),),
    )


def lay_out(blobs: Sequence[BlobRow]) -> BlobMap:
    """Return the map of blobs, which all have a file."""
    by_file: dict[str, list[BlobRow]] = defaultdict(list)
    for blob in blobs:
        by_file[UNKNOWN if blob.path is None else one_line(blob.path.name)].append(blob)
    files = tuple(
        (name, tuple(sorted(some, key=lambda blob: blob.offset or 0)))
        for name, some in sorted(by_file.items())
    )
    width = min(_MAX_COLUMNS, max(len(some) for _, some in files))
    starts, row = [], 0
    for _, some in files:
        starts.append(row)
        row += divide_up(len(some), width)
    return BlobMap(files, width, tuple(starts), row)


def _picture(blob_map: BlobMap) -> Any:
    def paint(figure: Any) -> Any:
        axis = figure.add_subplot()
        axis.set_xlim(0, blob_map.width)
        axis.set_ylim(blob_map.row_count, 0)
        step = divide_up(len(blob_map.files), _TICKS)
        ticks = range(0, len(blob_map.files), step)
        names = [blob_map.files[number][0].removesuffix(".bin") for number in ticks]
        ends = (*blob_map.starts[1:], blob_map.row_count)
        middles = [(blob_map.starts[number] + ends[number]) / 2 for number in ticks]
        if len(blob_map.files) < blob_map.row_count:
            middles = [blob_map.starts[number] + 0.5 for number in ticks]
        axis.set_yticks(middles, names)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel("blob, by offset in its file")
        axis.spines[:].set_visible(False)
        return axis

    height = min(4.2, max(1.3, 0.5 + 0.045 * blob_map.row_count))
    return draw("blobs", (height, height), paint, _NAME)


def _pointer(blob_map: BlobMap) -> dict[str, Any]:
    blobs = [blob for _, some in blob_map.files for blob in some]
    skips = [
        (after.offset or 0) - (before.offset or 0) - before.length if number else after.offset or 0
        for _, some in blob_map.files
        for number, (before, after) in enumerate(zip((some[0], *some), some, strict=False))
    ]
    return {
        "kind": "blobs",
        "columns": blob_map.width,
        "rows": blob_map.row_count,
        "files": [name for name, _ in blob_map.files],
        "starts": list(blob_map.starts),
        "counts": [len(some) for _, some in blob_map.files],
        "layer": [blob.layer for blob in blobs],
        "expert": [blob.expert for blob in blobs],
        "hotness": [blob.hotness for blob in blobs],
        "skip": skips,
        "length": [blob.length for blob in blobs],
    }


def _files(blob_map: BlobMap) -> DataTable:
    rows = []
    for name, blobs in blob_map.files:
        numbers = [blob.hotness for blob in blobs if blob.hotness is not None]
        layers = sorted({blob.layer for blob in blobs})
        rows.append(
            (
                name,
                f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} to {layers[-1]}",
                f"{len(blobs):,}",
                size_text(sum(blob.length for blob in blobs)),
                f"{max(numbers):,} to {min(numbers):,}" if numbers else UNKNOWN,
            )
        )
    columns = (
        Column("file", "l"),
        Column("layers"),
        Column("blobs"),
        Column("bytes"),
        Column("selections"),
    )
    return DataTable("Files, from their hottest blob to the coldest", Table(columns, rows))


def _lengths(model: PackFacts) -> DataTable:
    rows = [
        ("blobs aligned to", size_text(model.blob_alignment)),
        ("weights aligned to", size_text(model.part_alignment)),
        ("padding", f"{length_text(model.padding_length)}, {share_text(model.padding_share)}"),
        ("index", size_text(model.index_length)),
    ]
    if model.hotness is not None and model.hotness.token_count is not None:
        rows.append(("tokens that ranked it", f"{model.hotness.token_count:,}"))
    return DataTable("Alignment", Table((Column("", "l"), Column("", "l")), rows), place="under")
