"""Models and packs as text: for people what they are, and their experts as tables, CSV and JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.common.escaping import one_line, shorten
from moepack.common.paths import is_remote
from moepack.common.shape import ROUTED_FAMILY
from moepack.common.sizes import count_text, named_text, ranges_text, size_text
from moepack.inspection.describe import BlobFacts, ExtractFacts, FamilyFacts, PackFacts, SourceFacts
from moepack.report import pack_text
from moepack.report.facts import csv_text
from moepack.report.page import Column, Page, Table
from moepack.report.values import UNKNOWN, number_text, parameters_text, tokens_text
from moepack.source.folder import SHARD_NAME

if TYPE_CHECKING:
    from moepack.inspection.listing import BlobRow, Row, TensorRow
    from moepack.pack.format.source_entry import ExpertsUsed


def inspected(facts: SourceFacts | PackFacts) -> Page:
    """Write the facts of a source or a pack."""
    return pack(facts) if isinstance(facts, PackFacts) else source(facts)


def source(facts: SourceFacts) -> Page:
    """Write the facts of a source."""
    total_length = facts.expert_length + facts.dense_length
    parameters, used = facts.parameters, facts.experts_used
    if isinstance(used, tuple):
        per_token = f"{min(used)} to {max(used)}, by layer" if used else UNKNOWN
    else:
        per_token = UNKNOWN if used is None else str(used)
    lines = [
        f"{_model(facts.name, facts.architecture)}, {count_text(len(facts.shards), 'shard')}",
        f"  layers with experts   {ranges_text(facts.layers)}",
        f"  experts per token     {per_token}",
        f"  expert bytes          {size_text(facts.expert_length)} "
        f"({facts.expert_length / max(total_length, 1):.1%} of all tensors)",
        f"  dense bytes           {size_text(facts.dense_length)}",
        f"  parameters            {parameters_text(parameters.total)} total, "
        f"{parameters_text(parameters.active)} active, "
        f"{parameters_text(parameters.expert)} in experts",
    ]
    if facts.mtp_layers:
        layers = ranges_text(facts.mtp_layers)
        lines.append(f"  prediction layers     {layers} (left out with --no-mtp)")
    blocks = [block for family in facts.families for block in _family(family)]
    name = os.path.basename(facts.shards[0].path)
    match = SHARD_NAME.match(name)
    if match and int(match["count"]) != len(facts.shards):
        blocks.append(f"  note: a whole model by its header, though its name is {one_line(name)}")
    return Page(*lines, *blocks)


def _model(name: str | None, architecture: str | None) -> str:
    return f"{shorten(name or 'a model without a name')} ({shorten(architecture or UNKNOWN)})"


def _family(family: FamilyFacts) -> tuple[str, Table]:
    line = (
        f"  {named_text('layer', family.layers)}: {count_text(family.expert_count, 'expert')} of "
        f"{family.bytes_per_expert:,} bytes ({family.family})"
    )
    rows = [
        (
            part.name,
            part.type,
            " x ".join(map(str, part.shape)) or "one value",
            f"{part.length:,}",
            "(inferred)" if part.inferred else "",
        )
        for part in family.parts
    ]
    return line, Table(_PARTS, rows, indent=4)


_PARTS = (
    *(Column("", "l", least=20), Column("", "l"), Column("", "l", rank=2), Column("", rank=1)),
    Column("", "l"),
)


def pack(facts: PackFacts) -> Page:
    """Write the facts of a pack."""
    source, made, layout = facts.source, "indexed", shorten(facts.layout_name or UNKNOWN)
    files = f"{count_text(len(facts.files), 'file')}, {size_text(facts.data_length)}"
    if facts.padding_share is None:
        layout += ": everything as in the source"
        files += " of the source"
    else:
        made, blobs, weights = "packed", facts.blob_alignment, facts.part_alignment
        layout += f": blobs aligned to {size_text(blobs)}, weights to {size_text(weights)}"
        files += f", padding {facts.padding_share:.1%}; {'' if facts.is_whole else 'not '}whole"
    context = UNKNOWN
    if source.context_length is not None:
        context = count_text(source.context_length, "token")
    dense = "left out" if facts.dense_length is None else size_text(facts.dense_length)
    lines = [
        f"{_model(source.name, source.architecture)}, {made} by {shorten(facts.tool)} from "
        f"{count_text(len(source.shards), 'shard')}",
        f"  layout     {layout}",
        f"  layers     {ranges_text(facts.layers)}",
        f"  blobs      {facts.blob_count:,}, with {count_text(facts.part_count, 'part')}, "
        f"{size_text(facts.expert_length)}",
        f"  used       {_used(source.experts_used)} a token; context {context}",
        f"  dense      {dense}",
        f"  files      {files}",
        f"  hotness    {_hotness(facts)}",
    ]
    if facts.mirror is not None:
        lines.append(f"  mirror     {pack_text.mirror(facts.mirror)}")
    if facts.partial is not None:
        lines.append(f"  here       {pack_text.partial(facts.partial)}")
    if facts.coverage is not None:
        shares = [
            f"{one.percent} %: {'not reached' if one.length is None else size_text(one.length)}"
            for one in facts.coverage.lengths
        ]
        total = size_text(facts.coverage.total_length)
        lines.append(f"  coverage   {', '.join(shares)} of {total}, by the counts that ranked them")
    return Page(*lines)


def _used(used: Mapping[str, ExpertsUsed]) -> str:
    """Write the number of experts that a token uses, by family."""
    texts = []
    for family, count in used.items():
        counts = [c for c in count if c is not None] if isinstance(count, list) else [count]
        least, most = min(counts, default=0), max(counts, default=0)
        text = f"{most}" if least == most else f"{least} to {most}"
        noun = f"expert{'' if text == '1' else 's'}"
        texts.append(f"{text} {noun if family == ROUTED_FAMILY else f'of {shorten(family)}'}")
    return ", ".join(texts) or UNKNOWN


def _hotness(facts: PackFacts) -> str:
    if facts.hotness is None:
        return "not measured: the order is the source's"
    count = facts.hotness_count("selection_count")
    selections = UNKNOWN if count is None else count_text(count, "selection")
    measured, blobs = facts.hotness_count("measured_blob_count"), facts.hotness_count("blob_count")
    covered = ""
    if measured is not None and blobs is not None:
        covered = f", of {measured:,} of {count_text(blobs, 'blob')}"
    return f"{selections} over {tokens_text(facts.hotness_count('token_count'))}{covered}"


def blob(facts: BlobFacts) -> Page:
    """Write the file and the offsets of a blob and its parts."""
    is_apart = facts.path is None
    rows = [
        (
            part.name,
            part.type,
            f"{part.offset:,}",
            f"{part.length:,}",
            part.path.name if is_apart else (part.digest or UNKNOWN)[-16:],
        )
        for part in facts.parts
    ]
    where = "" if facts.offset is None else f" at byte {facts.offset:,}"
    return Page(
        "no blob: its parts lie apart in the shards" if facts.path is None else str(facts.path),
        f"  layer {facts.layer} expert {facts.expert}: {count_text(facts.length, 'byte')}{where}",
        f"  rank {facts.rank:,}, hotness {number_text(facts.hotness)}",
        Table(_APART if is_apart else _IN_BLOB, rows, indent=2),
    )


_PLACED = (
    *(Column("part", "l", least=20), Column("type", "l", rank=3)),
    *(Column("offset"), Column("length", rank=1)),
)
_APART = (*_PLACED, Column("file", "l", rank=2, least=24))
_IN_BLOB = (*_PLACED, Column("digest, xxh3", "l", rank=2))


def extracted(facts: ExtractFacts) -> str:
    """Write the result of an extraction."""
    return f"{facts.path}: {count_text(facts.length, 'byte')}"


def listing(rows: Mapping[str, Any]) -> Page:
    """Write `blobs` and `tensors` as tables."""
    blobs, tensors = map(_blob_cells, rows["blobs"]), map(_tensor_cells, rows["tensors"])
    tables = Table(_BLOB_COLUMNS, [*blobs]), Table(_TENSOR_COLUMNS, [*tensors])
    return Page(*(table for table in tables if table.rows))


def _blob_cells(row: BlobRow) -> Sequence[str]:
    numbers = (str(row.layer), str(row.expert), f"{row.rank:,}", number_text(row.hotness))
    # An expert without a blob has no place; if none has one, these columns are left out.
    place = ("", "") if row.path is None else (number_text(row.offset), _file(row.path))
    family = "" if row.family == ROUTED_FAMILY else shorten(row.family)
    return (*numbers, size_text(row.length), *place, family)


def _tensor_cells(row: TensorRow) -> Sequence[str]:
    shape = "x".join(map(str, row.shape)) or "one value"
    place = f"{row.offset:,}", _file(row.path)
    return (shorten(row.name), row.type, size_text(row.length), *place, shape)


def _file(path: Path) -> str:
    return str(path) if is_remote(path) else path.name


_BLOB_COLUMNS = (
    *(Column("layer"), Column("expert"), Column("rank", rank=4), Column("hotness", rank=2)),
    *(Column("length", rank=1), Column("offset", rank=3), Column("file", "l", rank=3, least=24)),
    Column("family", "l", rank=5),
)
_TENSOR_COLUMNS = (
    *(Column("tensor", "l", least=16), Column("type", "l", rank=2), Column("length", rank=1)),
    *(Column("offset", rank=4), Column("file", "l", rank=4, least=24)),
    Column("shape", "l", rank=3),
)

COLUMNS = (
    *("kind", "layer", "expert", "family", "path", "offset", "length", "rank", "hotness"),
    *("name", "type", "shape"),
)
"""The columns of CSV; unknown cells are empty."""


def listing_csv(rows: Iterable[Row]) -> str:
    """Write rows as CSV with a heading. A shape is `2048x768`."""
    return csv_text(map(_csv_row, rows), COLUMNS)


def _csv_row(row: Row) -> Mapping[str, object]:
    values = {"kind": row.kind, **row._asdict()}
    if row.kind == "tensor":
        values["shape"] = "x".join(map(str, values["shape"]))
    return values
