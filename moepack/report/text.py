"""Facts as text, for people."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from moepack.errors import short
from moepack.report.facts import (
    BlobFacts,
    CoverageFacts,
    ExtractFacts,
    FamilyFacts,
    HotnessFacts,
    PackFacts,
    SourceFacts,
)
from moepack.sizes import count_text, ranges_text, size_text

if TYPE_CHECKING:  # these rooms bring numpy, and most commands write without them
    from moepack.packing.pack_model import PackSummary
    from moepack.verifying.report import Report

SHOWN_FINDINGS = 20
WIDTH = 80
"""The columns of a terminal that nobody made wider."""

UNKNOWN = "–"
"""What stands for a fact that is not known."""


def inspected(facts: SourceFacts | PackFacts) -> str:
    """Write the facts of a source or a pack."""
    return pack(facts) if isinstance(facts, PackFacts) else source(facts)


def source(facts: SourceFacts) -> str:
    """Write the facts of a source."""
    total_length = facts.expert_length + facts.dense_length
    parameters = facts.parameters
    lines = [
        f"{_model(facts.name, facts.architecture)}, {count_text(len(facts.shards), 'shard')}",
        f"  layers with experts   {ranges_text(facts.layers)}",
        f"  experts per token     {_experts_used(facts.experts_used)}",
        f"  expert bytes          {size_text(facts.expert_length)} "
        f"({facts.expert_length / max(total_length, 1):.1%} of all tensors)",
        f"  dense bytes           {size_text(facts.dense_length)}",
        f"  parameters            {_amount(parameters.total)} total, "
        f"{_amount(parameters.active)} active, {_amount(parameters.expert)} in experts",
    ]
    if facts.mtp_layers:
        layers = ranges_text(facts.mtp_layers)
        lines.append(f"  prediction layers     {layers} (left out with --no-mtp)")
    for family in facts.families:
        lines += _family(family)
    return "\n".join(lines)


def _model(name: str | None, architecture: str | None) -> str:
    return f"{short(name or 'a model without a name')} ({short(architecture or UNKNOWN)})"


def _experts_used(used: int | tuple[int, ...] | None) -> str:
    if isinstance(used, tuple):
        return f"{min(used)} to {max(used)}, by layer" if used else UNKNOWN
    return UNKNOWN if used is None else str(used)


def _amount(number: int | None) -> str:
    if number is None:
        return UNKNOWN
    for factor, unit in ((10**9, "B"), (10**6, "M")):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:,}"


def _family(family: FamilyFacts) -> list[str]:
    layers = f"layer{'s' * (len(family.layers) > 1)} {ranges_text(family.layers)}"
    lines = [
        f"  {layers}: {family.expert_count:,} experts of "
        f"{family.bytes_per_expert:,} bytes ({family.family})"
    ]
    for part in family.parts:
        shape = " x ".join(map(str, part.shape)) or "one value"
        mark = " (inferred)" if part.inferred else ""
        lines.append(f"    {part.name:<28} {part.type:<8} {shape:<14} {part.length:>11,}{mark}")
    return lines


def pack(facts: PackFacts) -> str:
    """Write the facts of a pack."""
    shards = facts.source.shards
    count = f"{UNKNOWN} shards" if shards is None else count_text(len(shards), "shard")
    lines = [
        f"{_model(facts.source.name, facts.source.architecture)}, "
        f"packed by {short(facts.tool)} from {count}",
        f"  layout     {short(facts.layout.name or UNKNOWN)}: blobs aligned to "
        f"{facts.blob_alignment:,}, weights to {facts.part_alignment:,} bytes",
        f"  layers     {ranges_text(facts.layers)}",
        f"  blobs      {facts.blob_count:,} of {facts.part_count:,} parts",
        f"  files      {len(facts.files):,}, {size_text(facts.data_length)}, "
        f"padding {facts.padding_share:.2%}",
        f"  hotness    {_hotness(facts.hotness)}",
    ]
    return "\n".join(lines + _coverage(facts.coverage))


def _hotness(facts: HotnessFacts | None) -> str:
    if facts is None:
        return "not measured: the order is the source's"
    tokens = "an unknown number of" if facts.token_count is None else f"{facts.token_count:,}"
    selections = UNKNOWN if facts.selection_count is None else f"{facts.selection_count:,}"
    return f"{selections} selections over {tokens} tokens"


def _coverage(facts: CoverageFacts | None) -> list[str]:
    """Write how many bytes hold how much of what was measured."""
    if facts is None or not facts.lengths or facts.total_length is None:
        return []
    shares = [
        f"{UNKNOWN if item.percent is None else item.percent} %: "
        f"{'not reached' if item.length is None else size_text(item.length)}"
        for item in facts.lengths
    ]
    basis = "the same counts as ranked them"
    if facts.held_out is not None:
        half = "later" if facts.held_out == "time" else f"divided by {short(facts.held_out)}"
        basis = f"a held-out half ({half})"
    label = "  coverage   "
    return [
        *textwrap.wrap(", ".join(shares), WIDTH, initial_indent=label, subsequent_indent=" " * 13),
        f"             of {size_text(facts.total_length)}, measured on {basis}",
    ]


def blob(facts: BlobFacts) -> str:
    """Write where a blob and its parts lie."""
    hotness = "not measured" if facts.hotness is None else f"{facts.hotness:,}"
    rows = [("part", "type", "offset", "length", "digest, xxh3")]
    rows += [
        (part.name, part.type, f"{part.offset:,}", f"{part.length:,}", part.digest[-16:])
        for part in facts.parts
    ]
    name, kind, offset, length, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [
        str(facts.path),
        f"  layer {facts.layer} expert {facts.expert}: {count_text(facts.length, 'byte')} at byte "
        f"{facts.offset:,}",
        f"  rank {facts.rank:,}, hotness {hotness}",
    ]
    lines += [
        f"  {row[0]:<{name}}  {row[1]:<{kind}} {row[2]:>{offset}} {row[3]:>{length}}  {row[4]}"
        for row in rows
    ]
    return "\n".join(lines)


def extracted(facts: ExtractFacts) -> str:
    """Write what was extracted."""
    return f"{facts.path}: {count_text(facts.length, 'byte')}"


def packed(summary: PackSummary) -> str:
    """Write what a pack came to, or what it would be."""
    files = f"{count_text(summary.file_count, 'file')}, {size_text(summary.data_length)}"
    lines = [
        f"layout {summary.layout}, order by {summary.order}",
        f"  {summary.blob_count:,} blobs of layers {ranges_text(summary.layers)}",
        f"  {files}, and an index of {size_text(summary.index_length)}",
        f"  padding {summary.padding_share:.2%}",
    ]
    if summary.resumed_file_count is None:
        lines += [f"  free space {size_text(summary.free_space)}", "nothing was written"]
        return "\n".join(lines)
    resumed = summary.resumed_file_count
    written = f"{summary.path}: {count_text(summary.file_count - resumed, 'file')} written"
    return "\n".join([*lines, written + (f", {resumed} taken over" if resumed else "")])


def report(outcome: Report, shown: int | None = SHOWN_FINDINGS) -> str:
    """Write the outcome of a verification and its first `shown` findings; None is all of them."""
    lines = [str(finding) for finding in outcome.findings[:shown]]
    hidden = len(outcome.findings) - len(lines)
    if hidden:
        lines.append(f"… and {hidden:,} more: -v lists all")
    compared = outcome.compared_length
    against = (
        "digests only" if compared is None else f"{size_text(compared)} compared with the source"
    )
    count = len(outcome.findings)
    verdict = "whole" if outcome.passed else count_text(count, "finding")
    lines.append(
        f"{outcome.path}: {verdict}. {outcome.blob_count:,} blobs, {outcome.part_count:,} parts, "
        f"{size_text(outcome.read_length)} read, {against}"
    )
    return "\n".join(lines)
