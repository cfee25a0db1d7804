"""The sections about a model and its pack: their parts in bytes, and a map of the blobs."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle

import numpy as np

from moepack.common.escaping import one_line
from moepack.common.shape import is_row_table
from moepack.common.sizes import count_text, divide_up, size_text
from moepack.inspection.describe import PackFacts, PartFacts, SourceFacts
from moepack.inspection.listing import BlobRow
from moepack.pack.format.tables import PackedFamily, PartKind
from moepack.report import model_text
from moepack.report.html.drawing import Axis, cell_map, row_ticks, size_axis, stacked_bars
from moepack.report.html.section import (
    DataTable,
    Key,
    PageSection,
    Picture,
    Pointer,
    ReportFacts,
)
from moepack.report.page import Column, Table
from moepack.report.values import UNKNOWN, parameters_text, share_text
from moepack.source.parameters import Parameters

Model = SourceFacts | PackFacts

_DENSE = {
    "shared experts": ("c7", r"_shexp\."),
    "routers": ("c4", r"ffn_gate_inp|exp_probs"),
    "attention": ("c3", r"^blk\.\d+\.(attn|ssm|shortconv|indexer|time_mix|kda)"),
    "dense feed-forward": ("c6", r"^blk\.\d+\.ffn_(gate|up|down)\."),
    "embeddings and output": ("c2", r"^(token_embd|output)\."),
    "everything else": ("muted", ""),
}
"""The kinds of dense tensors: their colours, and patterns of their names."""
_TABLES = Key("row tables", "ink", "fill")
_EXPERT_COLOURS = ("c1", "c5", "c8")


def model_section(facts: ReportFacts) -> PageSection:
    """Write the extent of a model, and draw its bytes by part."""
    model, parts, parameters = facts.model, _parts(facts), _parameters(facts)
    total = sum(parts.values())
    rest = "all else but its row tables" if _TABLES in parts else "everything else"
    texts = {key: (size_text(length), share_text(length / total)) for key, length in parts.items()}
    pieces = [(key, parts[key], ", ".join(text)) for key, text in texts.items()]
    columns = (Column("part", "l"), Column("bytes"), Column("share"))
    table = Table(columns, [(key.label, *text) for key, text in texts.items()])
    figure = Picture(
        "parts",
        "Bytes by part",
        f"One bar of {size_text(total)}, divided into "
        + ", ".join(f"{key.label} {share}" for key, (_, share) in texts.items()),
        stacked_bars(size_axis(total), {"": pieces}, 2.5),
        keys=[*parts],
    )
    headline = [(size_text(total), "of weights")]
    if parameters is not None:
        active = f"parameters, {parameters_text(parameters.active)} active in a token"
        headline.insert(0, (parameters_text(parameters.total), active))
    unknown = []
    if isinstance(model, PackFacts) and model.dense_length is None:
        unknown = ["the pack has experts alone: the bytes of everything else are not in the bar"]
    elif isinstance(model, SourceFacts) and model.mtp_layers:
        count = count_text(len(model.mtp_layers), "layer")
        use = "which llama.cpp runs only to draft tokens"
        unknown = [f"{count} for multi-token prediction, {use}, are counted"]
    return PageSection(
        name="model",
        sentence=f"{model.expert_length / total:.0%} of its {size_text(total)} are experts, of "
        f"which a token uses a few; {rest} is used by every token",
        figures=[figure],
        tables=[DataTable("Bytes by part", table)],
        blocks=model_text.inspected(model).blocks,
        unknown=unknown,
        headline=headline,
    )


def _parts(facts: ReportFacts) -> dict[Key, int]:
    """Return the bytes of each part: experts by projection, dense tensors by kind, padding."""
    experts: Counter[str] = Counter()
    for layers, expert_count, parts in _families(facts.model):
        for part in parts:  # a projection's small parts with its matrix
            name = re.sub(r"^ffn_|_(ch)?exps?$", "", part.name.partition(".")[0])
            experts[name] += part.length * expert_count * len(layers)
    dense: Counter[Key] = Counter()
    for tensor in facts.tensors:
        dense[_kind(tensor.name)] += tensor.length
    colours = cycle(_EXPERT_COLOURS)
    lengths = {
        Key(f"experts: {name}", next(colours), "fill"): length
        for name, length in experts.most_common()
    }
    lengths |= dict(dense.most_common())
    if isinstance(facts.model, PackFacts) and facts.model.padding_length:
        lengths[Key("padding", "grid", "fill")] = facts.model.padding_length
    return lengths


def _kind(tensor: str) -> Key:
    if is_row_table(tensor):
        return _TABLES
    kinds = (
        Key(name, colour, "fill")
        for name, (colour, pattern) in _DENSE.items()
        if re.search(pattern, tensor)
    )
    return next(kinds)


def _families(model: Model) -> Iterator[tuple[Sequence[int], int, Sequence[PartFacts | PartKind]]]:
    """Yield for each family its layers, the experts in each of them, and the parts of an expert."""
    for family in model.families:
        if isinstance(family, PackedFamily):
            yield (family.layer,), family.expert_count, family.part_kinds
        else:
            yield family.layers, family.expert_count, family.parts


def _parameters(facts: ReportFacts) -> Parameters | None:
    """Return the parameters: a pack alone does not say how many there are."""
    if isinstance(facts.model, SourceFacts):
        return facts.model.parameters
    return None if facts.placement is None else facts.placement.parameters


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
        figures=[figure],
        tables=[_files(files)],
        unknown=[] if is_measured else [unknown],
    )


def _map(files: Files) -> tuple[str, Pointer]:
    """Draw a cell for each blob, in rows for each file, and return their texts too."""
    columns = min(_MAX_COLUMNS, max(map(len, files.values())))
    cells: list[BlobRow | None] = []
    names: list[str] = []
    middles = []
    for name, blobs in files.items():
        row_count = divide_up(len(blobs), columns)
        middles.append(len(cells) / columns + row_count / 2)
        names += [name] * row_count * columns
        cells += [*blobs, *[None] * (row_count * columns - len(blobs))]
    ranks = np.array([math.nan if blob is None else blob.rank for blob in cells])
    levels = (1 - ranks / max(1, np.nanmax(ranks))).reshape(-1, columns)
    ticks = row_ticks([name.removesuffix(".bin") for name in files], middles)
    height = min(19, max(4, 0.2 * len(levels)))
    svg = cell_map(levels, "blob, by offset in its file", Axis("", len(levels), 0, ticks), height)
    text = (
        "layer {layer}, expert {expert}\n{hotness:,} selections\n"
        "{length:,} bytes at byte {offset:,}\nof {file}"
    )
    fields = ("layer", "expert", "hotness", "length", "offset")
    values = {field: [getattr(blob, field, None) for blob in cells] for field in fields}
    return svg, Pointer(len(levels), columns, text, values | {"file": names})


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
