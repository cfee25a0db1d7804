"""How the command line writes things for people."""

from typing import Any

from moepack.sizes import ranges_text, size_text
from moepack.verifying.report import Report

SHOWN_FINDINGS = 20


def _count(number: int | None) -> str:
    if number is None:
        return "unknown"
    for factor, unit in ((10**9, "B"), (10**6, "M")):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return str(number)


def source(facts: dict[str, Any]) -> str:
    """Write what `inspection.describe_source` gave."""
    used = facts["experts_used"]
    total = facts["expert_length"] + facts["dense_length"]
    parameters = facts["parameters"]
    lines = [
        f"{facts['name'] or 'a model without a name'} ({facts['architecture'] or 'unknown'}), "
        f"{len(facts['shards'])} shards",
        f"  layers with experts   {ranges_text(facts['layers'])}",
        f"  experts per token     {'unknown' if used is None else used}",
        f"  expert bytes          {size_text(facts['expert_length'])} "
        f"({facts['expert_length'] / max(total, 1):.1%} of all tensors)",
        f"  dense bytes           {size_text(facts['dense_length'])}",
        f"  parameters            {_count(parameters['total'])} total, "
        f"{_count(parameters['active'])} active, {_count(parameters['expert'])} in experts",
    ]
    if facts["mtp_layers"]:
        layers = ranges_text(facts["mtp_layers"])
        lines.append(f"  prediction layers     {layers} (left out with --no-mtp)")
    for family in facts["families"]:
        lines.append(
            f"  layers {ranges_text(family['layers'])}: {family['expert_count']} experts of "
            f"{family['bytes_per_expert']:,} bytes ({family['family']})"
        )
        for part in family["parts"]:
            shape = " x ".join(map(str, part["shape"])) or "one value"
            mark = "  type unknown: length from the gap" if part["inferred"] else ""
            lines.append(
                f"    {part['name']:<28} {part['type']:<8} {shape:<14} {part['length']:>11,}{mark}"
            )
    return "\n".join(lines)


def pack(facts: dict[str, Any]) -> str:
    """Write what `inspection.describe_pack` gave."""
    origin = facts["source"]
    shards = origin.get("shards")
    shard_count = len(shards) if isinstance(shards, list) else "an unknown number of"
    hotness = facts["hotness"]
    counted = "not measured: the order is the source's"
    if hotness:
        tokens = hotness.get("token_count")
        over = "an unknown number of" if tokens is None else tokens
        counted = f"{hotness.get('selection_count')} selections over {over} tokens"
    return "\n".join(
        (
            f"{origin.get('name') or 'a model without a name'} ({origin.get('architecture')}), "
            f"packed by {facts['tool']} from {shard_count} shards",
            f"  layout     {facts['layout'].get('name')}: blobs aligned to "
            f"{facts['blob_alignment']}, weights to {facts['part_alignment']} bytes",
            f"  layers     {ranges_text(facts['layers'])}",
            f"  blobs      {facts['blob_count']:,} of {facts['part_count']:,} parts",
            f"  files      {len(facts['files'])}, {size_text(facts['data_length'])}, "
            f"padding {facts['padding_share']:.2%}",
            f"  hotness    {counted}",
            *_coverage(facts["coverage"]),
        )
    )


def _coverage(facts: dict[str, Any] | None) -> list[str]:
    """Write how many bytes hold how much of what was measured."""
    if facts is None:
        return []
    shares = [
        f"{one['percent']} %: {'more' if one['length'] is None else size_text(one['length'])}"
        for one in facts["lengths"]
    ]
    by = facts["held_out"]
    how = "the same counts as ranked them" if by is None else f"a held-out half, divided by {by}"
    return [
        f"  coverage   {', '.join(shares)}",
        f"             of {size_text(facts['total_length'])}, on {how}",
    ]


def plan(facts: dict[str, Any]) -> str:
    """Write the plan of a pack that is not made yet."""
    return f"{_figures(facts)}\n  free space {size_text(facts['free_space'])}\nnothing was written"


def packed(facts: dict[str, Any]) -> str:
    """Write what a pack came to."""
    resumed = facts["resumed_file_count"]
    written = f"{facts['path']}: {facts['file_count'] - resumed} files written"
    return f"{_figures(facts)}\n{written}" + (f", {resumed} taken over" if resumed else "")


def _figures(facts: dict[str, Any]) -> str:
    return "\n".join(
        (
            f"layout {facts['layout']}, order by {facts['order']}",
            f"  {facts['blob_count']:,} blobs of layers {ranges_text(facts['layers'])}",
            f"  {facts['file_count']} files, {size_text(facts['data_length'])}, "
            f"and an index of {size_text(facts['index_length'])}",
            f"  padding {facts['padding_share']:.2%}",
        )
    )


def report(outcome: Report) -> str:
    """Write the outcome of a verification, the first findings of many."""
    lines = [str(finding) for finding in outcome.findings[:SHOWN_FINDINGS]]
    hidden = len(outcome.findings) - len(lines)
    if hidden:
        lines.append(f"… and {hidden} more: --json lists all")
    compared = outcome.compared_length
    against = (
        "digests only" if compared is None else f"{size_text(compared)} compared with the source"
    )
    count = len(outcome.findings)
    verdict = "whole" if outcome.passed else f"{count} finding{'s' * (count > 1)}"
    lines.append(
        f"{outcome.path}: {verdict}. {outcome.blob_count:,} blobs, {outcome.part_count:,} parts, "
        f"{size_text(outcome.read_length)} read, {against}"
    )
    return "\n".join(lines)


def blob(facts: dict[str, Any]) -> str:
    """Write where a blob and its parts lie."""
    hotness = "not measured" if facts["hotness"] is None else facts["hotness"]
    lines = [
        facts["path"],
        f"  layer {facts['layer']} expert {facts['expert']}  offset {facts['offset']:,}  "
        f"length {facts['length']:,}  rank {facts['rank']}  hotness {hotness}",
    ]
    lines += [
        f"    {part['name']:<28} {part['type']:<8} offset {part['offset']:>14,}  "
        f"length {part['length']:>11,}  {part['digest']}"
        for part in facts["parts"]
    ]
    return "\n".join(lines)
