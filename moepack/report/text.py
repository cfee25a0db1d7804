"""Facts as text, for people."""

from __future__ import annotations

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
from moepack.sizes import ranges_text, size_text

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
        f"{_model(facts.name, facts.architecture)}, {len(facts.shards)} shards",
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
    return str(number)


def _family(family: FamilyFacts) -> list[str]:
    lines = [
        f"  layers {ranges_text(family.layers)}: {family.expert_count} experts of "
        f"{family.bytes_per_expert:,} bytes ({family.family})"
    ]
    for part in family.parts:
        shape = " x ".join(map(str, part.shape)) or "one value"
        mark = "  type unknown: length from the gap" if part.inferred else ""
        lines.append(f"    {part.name:<28} {part.type:<8} {shape:<14} {part.length:>11,}{mark}")
    return lines


def pack(facts: PackFacts) -> str:
    """Write the facts of a pack."""
    shards = facts.source.shards
    count = UNKNOWN if shards is None else len(shards)
    lines = [
        f"{_model(facts.source.name, facts.source.architecture)}, "
        f"packed by {short(facts.tool)} from {count} shards",
        f"  layout     {short(facts.layout.name or UNKNOWN)}: blobs aligned to "
        f"{facts.blob_alignment}, weights to {facts.part_alignment} bytes",
        f"  layers     {ranges_text(facts.layers)}",
        f"  blobs      {facts.blob_count:,} of {facts.part_count:,} parts",
        f"  files      {len(facts.files)}, {size_text(facts.data_length)}, "
        f"padding {facts.padding_share:.2%}",
        f"  hotness    {_hotness(facts.hotness)}",
    ]
    return "\n".join(lines + _coverage(facts.coverage))


def _hotness(facts: HotnessFacts | None) -> str:
    if facts is None:
        return "not measured: the order is the source's"
    tokens = "an unknown number of" if facts.token_count is None else facts.token_count
    selections = UNKNOWN if facts.selection_count is None else facts.selection_count
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
    return [
        f"  coverage   {', '.join(shares)}",
        f"             of {size_text(facts.total_length)}, measured on {basis}",
    ]


def blob(facts: BlobFacts) -> str:
    """Write where a blob and its parts lie."""
    hotness = UNKNOWN if facts.hotness is None else f"{facts.hotness:,}"
    offset = UNKNOWN if facts.offset is None else f"{facts.offset:,}"
    lines = [
        "no blob: its parts lie apart" if facts.path is None else str(facts.path),
        f"  layer {facts.layer} expert {facts.expert}  offset {offset}  "
        f"length {facts.length:,}  rank {facts.rank}  hotness {hotness}",
    ]
    lines += [
        f"    {part.name:<28} {part.type:<8} offset {part.offset:>14,}  "
        f"length {part.length:>11,}  {part.digest or UNKNOWN}"
        for part in facts.parts
    ]
    return "\n".join(lines)


def extracted(facts: ExtractFacts) -> str:
    """Write what was extracted."""
    return f"{facts.path}: {facts.length:,} bytes"
