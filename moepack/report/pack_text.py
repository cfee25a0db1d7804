"""Results of packing, indexing, restoring and mounting, as text for people."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moepack.common.sizes import count_text, named_text, size_text
from moepack.report import digest_text
from moepack.report.page import Page, Verbatim
from moepack.report.values import seconds_text, speed_text, tokens_text

if TYPE_CHECKING:  # these rooms bring numpy, and most commands write without them
    from moepack.pack.mounting.mount import MountFacts
    from moepack.packing.plan.pack_summary import PackSummary
    from moepack.packing.ranking import RankSummary
    from moepack.packing.restore import RestoreSummary
    from moepack.packing.shard_index import IndexSummary

SHOWN_SECONDS = 1.0
"""The least time from which a speed is shown."""


def plan(summary: PackSummary) -> str:
    """Write the plan of a pack."""
    order = "hotness" if summary.order == "hotness" else "the source"
    dense = "left out: the source stays needed"
    if summary.dense_length is not None:
        dense = f"{size_text(summary.dense_length)}, and the headers of the shards"
    lines = [
        f"{summary.path}: layout {summary.layout}, in the order of {order}",
        f"  experts   {count_text(summary.blob_count, 'blob')} of "
        f"{named_text('layer', summary.layers)}, {size_text(summary.expert_length)}",
        f"  dense     {dense}",
        f"  hotness   {_hotness(summary)}",
        f"  files     {count_text(summary.file_count, 'file')}, {size_text(summary.data_length)} "
        f"with {summary.padding_share:.1%} padding; index {size_text(summary.index_length)}",
    ]
    if not summary.is_whole:
        lines.append(f"  whole     no, {_missing(summary)}: nothing can be restored from it")
    if summary.dry_run and summary.free_space is not None:
        lines.append(f"  free      {size_text(summary.free_space)}")
    if summary.in_place is not None:
        facts = summary.in_place
        units = f"{count_text(facts.unit_count, 'unit')} of up to {size_text(facts.unit_length)}"
        lines.append(f"  in place  {units}, {size_text(facts.extra_length)} have to be free")
        lines += [f"  refused   {refusal}" for refusal in facts.refusals]
    return "\n".join(lines)


def ranked(summary: RankSummary) -> str:
    """Write the coverage of a new ranking."""
    if not summary.is_changed:
        return f"{summary.path}: has this ranking already"
    tokens = tokens_text(summary.hotness_token_count)
    return (
        f"{summary.path}: ranked again, {summary.measured_blob_count:,} of"
        f" {count_text(summary.blob_count, 'blob')} measured over {tokens}; in {summary.index_name}"
    )


def what_is_given_up(summary: PackSummary) -> str:
    """Write the effect of packing in place on the shards."""
    assert summary.in_place is not None
    shards = summary.in_place.shards
    length = size_text(sum(shard.length for shard in shards))
    folder = os.path.dirname(os.path.abspath(shards[0].name))
    return (
        f"{count_text(len(shards), 'shard')} in {folder} ({length}) will be turned into"
        f" {summary.path}, and be gone; `moepack restore` makes them again"
    )


def _missing(summary: PackSummary) -> str:
    missing = ["layers"] * (summary.selected_layers is not None)
    missing += ["the dense part"] * (summary.dense_length is None)
    verb = "is" if missing == ["the dense part"] else "are"
    return f"{' and '.join(missing)} {verb} left out"


def _hotness(summary: PackSummary) -> str:
    if summary.measured_blob_count is None:
        return "none given"
    share = f"{summary.measured_blob_count:,} of {count_text(summary.blob_count, 'blob')}"
    return f"{share} measured, over {tokens_text(summary.hotness_token_count)}"


def packed(summary: PackSummary) -> str:
    """Write the result of packing."""
    if summary.is_finished:
        return (
            f"{summary.path}: is there already, of shards with these names, lengths and headers; "
            f"{digest_text.compared(summary.digests)}"
        )
    if summary.written_length is None:
        return "nothing was written"
    resumed = summary.resumed_file_count or 0
    count = summary.file_count - resumed - (summary.missing_file_count or 0)
    seconds, speed = summary.seconds, ""
    if seconds is not None and seconds >= SHOWN_SECONDS:
        speed = f" in {seconds_text(seconds)} ({speed_text(summary.written_length / seconds)})"
    text = (
        f"{summary.path}: {count_text(count, 'file')}, "
        f"{size_text(summary.written_length)} written{speed}"
    )
    if resumed:
        text += f", {resumed} finished before: {digest_text.compared(summary.digests)}"
    if summary.damaged_files:
        text += f"\n  damaged, and written anew: {', '.join(summary.damaged_files)}"
    if summary.missing_file_count is not None:
        left = "all files are written"
        if summary.missing_file_count:
            left = f"{count_text(summary.missing_file_count, 'file')} of other parts missing"
        return f"{text}\n  {left}; `moepack pack … --commit` makes a pack of them"
    return text


def indexed(summary: IndexSummary) -> str:
    """Write the extent of an index."""
    digests = "with digests" if summary.has_digests else "without digests"
    return (
        f"{summary.path}: {count_text(summary.blob_count, 'expert')} of "
        f"{named_text('layer', summary.layers)} in {count_text(len(summary.files), 'shard')}, "
        f"{digests}; nothing was copied\n"
        f"  the shards have to stay where they are: it has links to them"
    )


def restored(summary: RestoreSummary) -> str:
    """Write the number of restored shards, and their proof."""
    text = f"{summary.path}: {count_text(len(summary.files), 'shard')}, {size_text(summary.length)}"
    if summary.cloned_length:
        text += f", {size_text(summary.cloned_length)} of it shared with the pack"
    if summary.kept_length:
        text += f", {size_text(summary.kept_length)} there already"
    text += f"; {digest_text.compared(summary.digests)}"
    if summary.sha256_count:
        text += f", {count_text(summary.sha256_count, 'shard')} the SHA-256 of the source"
    return f"{text}; the pack is gone" if summary.is_in_place else text


def mounted(facts: MountFacts) -> Page:
    """Write the folder of the mounted shards, and the ways to unmount it."""
    count = count_text(len(facts.files), "shard")
    return Page(
        f"{facts.path}: {count}, {size_text(facts.length)}, read-only; nothing is stored",
        Verbatim(f"  Ctrl-C ends it, or: {facts.unmount}"),
    )
