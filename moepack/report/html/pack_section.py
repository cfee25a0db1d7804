"""The section about a pack: a map of the blobs in each file, from the hottest to the coldest."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from moepack.common.escaping import one_line
from moepack.common.sizes import count_text, divide_up, size_text
from moepack.inspection.facts import PackFacts
from moepack.inspection.listing import BlobRow
from moepack.report.html.drawing import Axis, cell_map, row_ticks
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, PageSection, Picture, pair_rows
from moepack.report.page import Column, Table
from moepack.report.values import UNKNOWN, length_text, share_text

_MAX_COLUMNS = 512

Files = dict[str, list[BlobRow]]
"""The blobs of each file by offset, by the files' names."""


def pack_section(facts: ReportFacts) -> PageSection | str:
    """Draw the blobs of a pack by file, the hottest brightest."""
    model = facts.model
    placed = [blob for blob in facts.blobs if blob.path is not None]
    if not placed or not isinstance(model, PackFacts):
        kind, shards = ("an index", "the") if isinstance(model, PackFacts) else ("a GGUF", "its")
        reason = f"{kind} has no blobs: the parts of an expert lie apart in {shards} shards"
        return f"{reason}; `moepack pack MODEL -o MODEL.moepack` makes a pack"
    files: Files = defaultdict(list)
    for blob in sorted(placed, key=lambda blob: (blob.path, blob.offset)):
        files[one_line(blob.path.name) if blob.path else UNKNOWN].append(blob)
    is_measured = any(blob.hotness is not None for blob in placed)
    order = "the hottest first" if model.order == "hotness" else "in the order of the source"
    each = " in each" if len(files) > 1 else ""
    count = count_text(len(placed), "blob")
    text = f"{count} in {count_text(len(files), 'file')}, {order}{each}"
    ramp = ("coldest", "hottest") if is_measured else ("last", "first")
    svg, pointer = _map(files)
    figure = Picture(
        "blobs",
        "Blobs by file and offset, coloured by rank",
        f"A row of cells for each file, a cell for each blob: {text}. "
        f"The table has the same by file.",
        svg,
        ramp=(f"{ramp[0]} of the pack", f"{ramp[1]} of the pack"),
        pointer=pointer,
    )
    unknown = "the hotness of this pack was not measured: ranks are the order of the source"
    return PageSection(
        name="pack",
        sentence=f"{text}: one aligned read brings one expert",
        figures=(figure,),
        tables=(_files(files), _lengths(model)),
        unknown=() if is_measured else (unknown,),
    )


def _map(files: Files) -> tuple[str, dict[str, Any]]:
    """Draw a cell for each blob, in rows for each file, and return the data of the pointer too."""
    columns = min(_MAX_COLUMNS, max(map(len, files.values())))
    row_counts = [divide_up(len(blobs), columns) for blobs in files.values()]
    starts = [sum(row_counts[:number]) for number in range(len(files))]
    cells = np.full((sum(row_counts), columns), np.nan)
    last = max(1, max(blob.rank for blobs in files.values() for blob in blobs))
    skips = []
    for start, blobs in zip(starts, files.values(), strict=True):
        ranks = np.array([blob.rank for blob in blobs])
        cells[start:].reshape(-1)[: len(ranks)] = 1 - ranks / last
        end = 0
        for blob in blobs:
            skips.append((blob.offset or 0) - end)
            end = (blob.offset or 0) + blob.length
    middles = [start + count / 2 for start, count in zip(starts, row_counts, strict=True)]
    names = [name.removesuffix(".bin") for name in files]
    up = Axis("", len(cells), 0, row_ticks(names, middles))
    svg = cell_map(cells, "blob, by offset in its file", up, min(19, max(4, 0.2 * len(cells))))
    all_blobs = [blob for blobs in files.values() for blob in blobs]
    return svg, {
        "kind": "blobs",
        "columns": columns,
        "rows": len(cells),
        "files": [*files],
        "starts": starts,
        "counts": [*map(len, files.values())],
        "layer": [blob.layer for blob in all_blobs],
        "expert": [blob.expert for blob in all_blobs],
        "hotness": [blob.hotness for blob in all_blobs],
        "skip": skips,
        "length": [blob.length for blob in all_blobs],
    }


def _files(files: Files) -> DataTable:
    rows = []
    for name, blobs in files.items():
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
    names = ("layers", "blobs", "bytes", "selections")
    columns = (Column("file", "l"), *map(Column, names))
    return DataTable("Files, from their hottest blob to the coldest", Table(columns, rows))


def _lengths(model: PackFacts) -> DataTable:
    rows = [
        ("blobs aligned to", size_text(model.blob_alignment)),
        ("weights aligned to", size_text(model.part_alignment)),
        ("padding", f"{length_text(model.padding_length)}, {share_text(model.padding_share)}"),
        ("index", size_text(model.index_length)),
    ]
    token_count = model.hotness_count("token_count")
    if token_count is not None:
        rows.append(("tokens that ranked it", f"{token_count:,}"))
    return DataTable("Alignment", pair_rows(rows), place="under")
