"""What packing, indexing, restoring, exporting and mounting came to, as text for people."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moepack.report.page import Page, Verbatim
from moepack.report.values import seconds_text, speed_text
from moepack.sizes import count_text, named_text, size_text

if TYPE_CHECKING:  # these rooms bring numpy, and most commands write without them
    from moepack.engines.stock_gguf import ExportSummary
    from moepack.mounting.mount import MountFacts
    from moepack.packing.pack_summary import InPlaceFacts, PackSummary
    from moepack.packing.ranking import RankSummary
    from moepack.packing.restore import RestoreSummary
    from moepack.packing.shard_index import IndexSummary

SHOWN_SECONDS = 1.0
"""What took less has no speed worth telling."""


def plan(summary: PackSummary) -> str:
    """Write what a pack will be."""
    lines = [
        f"{summary.path}: layout {summary.layout}, in the order of {_order(summary)}",
        f"  experts   {count_text(summary.blob_count, 'blob')} of "
        f"{named_text('layer', summary.layers)}, {size_text(summary.expert_length)}",
        f"  dense     {_dense(summary.dense_length)}",
        f"  hotness   {_hotness(summary)}",
        f"  files     {count_text(summary.file_count, 'file')}, {size_text(summary.data_length)} "
        f"with {summary.padding_share:.1%} padding; index {size_text(summary.index_length)}",
    ]
    if summary.codec is not None:
        when = "where it shortens a part by 5 %; files are at most that long"
        lines.append(f"  codec     {summary.codec}, {when}")
    if not summary.is_whole:
        lines.append(f"  whole     no, {_missing(summary)}: nothing can be restored from it")
    if summary.dry_run:
        lines.append(f"  free      {size_text(summary.free_space)}")
    if summary.in_place is not None:
        lines += _in_place(summary.in_place)
    return "\n".join(lines)


def ranked(summary: RankSummary) -> str:
    """Write what a new ranking covers."""
    if not summary.is_changed:
        return f"{summary.path}: has this ranking already"
    tokens = "an unknown number of tokens"
    if summary.hotness_token_count is not None:
        tokens = count_text(summary.hotness_token_count, "token")
    return (
        f"{summary.path}: ranked anew, {summary.measured_blob_count:,} of"
        f" {count_text(summary.blob_count, 'blob')} measured over {tokens}; in {summary.index_name}"
    )


def _in_place(facts: InPlaceFacts) -> list[str]:
    units = f"{count_text(facts.unit_count, 'unit')} of up to {size_text(facts.unit_length)}"
    lines = [f"  in place  {units}, {size_text(facts.extra_length)} have to be free meanwhile"]
    return lines + [f"  refused   {refusal}" for refusal in facts.refusals]


def what_is_given_up(summary: PackSummary) -> str:
    """Write what packing in place does to the shards."""
    assert summary.in_place is not None
    shards = summary.in_place.shards
    length = size_text(sum(shard.length for shard in shards))
    folder = os.path.dirname(os.path.abspath(shards[0].name))
    return (
        f"{count_text(len(shards), 'shard')} in {folder} ({length}) will be turned into"
        f" {summary.path}, and be gone; `moepack restore` makes them again"
    )


def _order(summary: PackSummary) -> str:
    return "hotness" if summary.order == "hotness" else "the source"


def _dense(length: int | None) -> str:
    if length is None:
        return "left out: the source stays needed"
    return f"{size_text(length)}, and the headers of the shards"


def _missing(summary: PackSummary) -> str:
    """Write what of the source is left out."""
    missing = ["layers"] * (summary.selected_layers is not None)
    missing += ["the dense part"] * (summary.dense_length is None)
    verb = "is" if missing == ["the dense part"] else "are"
    return f"{' and '.join(missing)} {verb} left out"


def _hotness(summary: PackSummary) -> str:
    if summary.measured_blob_count is None:
        return "none given"
    tokens = summary.hotness_token_count
    over = "an unknown number of tokens" if tokens is None else count_text(tokens, "token")
    share = f"{summary.measured_blob_count:,} of {count_text(summary.blob_count, 'blob')}"
    return f"{share} measured, over {over}"


def packed(summary: PackSummary) -> str:
    """Write how packing went."""
    if summary.written_length is None:
        return "nothing was written"
    resumed = summary.resumed_file_count or 0
    lines = [
        f"{summary.path}: {count_text(summary.file_count - resumed, 'file')}, "
        f"{size_text(summary.written_length)} written{_speed(summary)}"
        + (f", {resumed} taken over" if resumed else "")
    ]
    if summary.codec is not None and summary.stored_length is not None:
        lines.append(f"  {_saved(summary.expert_length, summary.stored_length, summary.codec)}")
    return "\n".join(lines)


def _saved(expert_length: int, stored_length: int, codec: str) -> str:
    """Write what a codec saved."""
    if stored_length == expert_length:
        return f"{codec} shortens no part enough: the pack is as without it"
    saved = 1 - stored_length / expert_length
    return f"experts stored in {size_text(stored_length)} by {codec}, {saved:.1%} less"


def _speed(summary: PackSummary) -> str:
    seconds = summary.seconds
    if seconds is None or seconds < SHOWN_SECONDS or summary.written_length is None:
        return ""
    return f" in {seconds_text(seconds)} ({speed_text(summary.written_length / seconds)})"


def indexed(summary: IndexSummary) -> str:
    """Write what an index covers."""
    digests = "with digests" if summary.has_digests else "without digests"
    return (
        f"{summary.path}: {count_text(summary.blob_count, 'expert')} of "
        f"{named_text('layer', summary.layers)} in {count_text(len(summary.files), 'shard')}, "
        f"{digests}; nothing was copied\n"
        f"  the shards have to stay where they are: it has links to them"
    )


def restored(summary: RestoreSummary) -> str:
    """Write which shards were restored, and how they were proven."""
    proven = _proven(summary)
    if summary.sha256_count:
        proven += f", {count_text(summary.sha256_count, 'shard')} the SHA-256 of the source"
    count = count_text(len(summary.files), "shard")
    gone = "; the pack is gone" if summary.is_in_place else ""
    return f"{summary.path}: {count}, {_how(summary)}; {proven}{gone}"


def exported(summary: ExportSummary) -> str:
    """Write what was exported."""
    count = count_text(summary.tensor_count, "tensor")
    return f"{summary.path}: {count}, {_how(summary)}; {_proven(summary)}"


def _proven(summary: RestoreSummary | ExportSummary) -> str:
    return "every part had its digest" if summary.has_digests else "digests are not known"


def mounted(facts: MountFacts) -> Page:
    """Write what is served where, and how to end it."""
    count = count_text(len(facts.files), "shard")
    return Page(
        f"{facts.path}: {count}, {size_text(facts.length)}, read-only; nothing is stored",
        Verbatim(f"  Ctrl-C ends it, or: {facts.unmount}"),
    )


def _how(summary: RestoreSummary | ExportSummary) -> str:
    ways = [size_text(summary.length)]
    if summary.cloned_length:
        ways.append(f"{size_text(summary.cloned_length)} of it shared with the pack")
    if summary.kept_length:
        ways.append(f"{size_text(summary.kept_length)} there already")
    return ", ".join(ways)
