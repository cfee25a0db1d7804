"""Facts as text, for people."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moepack.common.escaping import one_line, shorten
from moepack.common.shape import ROUTED_FAMILY
from moepack.common.sizes import count_text, named_text, ranges_text, size_text
from moepack.inspection.facts import (
    BlobFacts,
    ExtractFacts,
    FamilyFacts,
    PackFacts,
    SourceFacts,
)
from moepack.pack.format.source_entry import ExpertsUsed
from moepack.report import mirror_text, pull_text
from moepack.report.page import Page
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, number_text, parameters_text, tokens_text
from moepack.source.folder import SHARD_NAME
from moepack.traces.hotness.coverage import Coverage


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
    source = facts.source
    count = count_text(len(source.shards), "shard")
    made = "indexed" if facts.padding_length is None else "packed"
    context = (
        UNKNOWN if source.context_length is None else count_text(source.context_length, "token")
    )
    dense = "left out" if facts.dense_length is None else size_text(facts.dense_length)
    lines = [
        f"{_model(source.name, source.architecture)}, {made} by {shorten(facts.tool)} from {count}",
        f"  layout     {_layout(facts)}",
        f"  layers     {ranges_text(facts.layers)}",
        f"  blobs      {facts.blob_count:,}, with {count_text(facts.part_count, 'part')}, "
        f"{size_text(facts.expert_length)}",
        f"  used       {_used(source.experts_used)} a token; context {context}",
        f"  dense      {dense}",
        f"  files      {_files(facts)}",
        f"  hotness    {_hotness(facts)}",
    ]
    if facts.mirror is not None:
        lines.append(f"  mirror     {mirror_text.mirror(facts.mirror)}")
    if facts.partial is not None:
        lines.append(f"  here       {pull_text.partial(facts.partial)}")
    return Page(*lines, *_coverage(facts.coverage))


def _layout(facts: PackFacts) -> str:
    name = shorten(facts.layout_name or UNKNOWN)
    if facts.padding_length is None:
        return f"{name}: everything as in the source"
    blobs, weights = facts.blob_alignment, facts.part_alignment
    return f"{name}: blobs aligned to {size_text(blobs)}, weights to {size_text(weights)}"


def _used(used: Mapping[str, ExpertsUsed]) -> str:
    """Write the number of experts that a token uses, by family."""
    texts = []
    for family, count in used.items():
        counts = [c for c in count if c is not None] if isinstance(count, list) else [count]
        least, most = min(counts, default=0), max(counts, default=0)
        text = f"{most}" if least == most else f"{least} to {most}"
        texts.append(
            f"{text} expert{'' if text == '1' else 's'}"
            if family == ROUTED_FAMILY
            else f"{text} of {shorten(family)}"
        )
    return ", ".join(texts) or UNKNOWN


def _files(facts: PackFacts) -> str:
    text = f"{count_text(len(facts.files), 'file')}, {size_text(facts.data_length)}"
    if facts.padding_share is None:
        return f"{text} of the source"
    return f"{text}, padding {facts.padding_share:.1%}; {'' if facts.is_whole else 'not '}whole"


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


def _coverage(facts: Coverage | None) -> list[str]:
    """Write the bytes of the hottest experts, by their share of the counts."""
    if facts is None:
        return []
    shares = [
        f"{item.percent} %: {'not reached' if item.length is None else size_text(item.length)}"
        for item in facts.lengths
    ]
    total = size_text(facts.total_length)
    return [f"  coverage   {', '.join(shares)} of {total}, by the counts that ranked them"]


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
