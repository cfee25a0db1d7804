"""Packs as text for people: made, ranked, copied, pulled, restored, mounted and exported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moepack.common.escaping import shorten
from moepack.common.phases import DigestCounts
from moepack.common.sizes import count_text, named_text, size_text
from moepack.report.page import Block, Page, Verbatim
from moepack.report.values import seconds_text, speed_text, tokens_text

if TYPE_CHECKING:  # these rooms bring numpy, and most commands write without them
    from moepack.inspection.describe import MirrorFacts, PartialFacts
    from moepack.pack.engines.contract import Engine
    from moepack.pack.engines.exporting import ExportSummary
    from moepack.pack.mounting.mount import MountFacts
    from moepack.packing.copies.mirror import MirrorSummary, RemovedMirror
    from moepack.packing.copies.pull import PullSummary
    from moepack.packing.copies.repair import RepairSummary
    from moepack.packing.fetched import FetchPlan
    from moepack.packing.plan.pack_summary import PackSummary
    from moepack.packing.ranking import RankSummary
    from moepack.packing.restore import RestoreSummary
    from moepack.packing.shard_index import IndexSummary

_SHOWN = 10
"""The number of names that are shown."""

SHOWN_SECONDS = 1.0
"""The least time from which a speed is shown."""


def compared(counts: DigestCounts) -> str:
    """Write whether this run compared all parts with their digests; name the rest.

    The one place that claims that parts had theirs.
    """
    unread_length = counts.known_length - counts.compared_length
    if unread_length and not counts.compared_length:
        return "no part was read"
    words = [f"parts of {size_text(unread_length)} were not read"] if unread_length else []
    if counts.unknown_length:
        of_some = f" of {size_text(counts.unknown_length)}" if counts.known_length else ""
        words.append(f"digests{of_some} are not known")
    if not words and counts.compared_length:
        return "every part had its digest"
    if counts.compared_length:
        words.append("every other part had its digest")
    return ", ".join(words) or "no digest was computed"


def plan(summary: PackSummary) -> str:
    """Write the plan of a pack."""
    order = "hotness" if summary.order == "hotness" else "the source"
    dense = "left out: the source stays needed"
    missing = ["layers"] * (summary.selected_layers is not None)
    if summary.dense_length is None:
        missing.append("the dense part")
    else:
        dense = f"{size_text(summary.dense_length)}, and the headers of the shards"
    hotness, blobs = "none given", count_text(summary.blob_count, "blob")
    if summary.measured_blob_count is not None:
        tokens = tokens_text(summary.hotness_token_count)
        hotness = f"{summary.measured_blob_count:,} of {blobs} measured, over {tokens}"
    lines = [
        f"{summary.path}: layout {summary.layout}, in the order of {order}",
        f"  experts   {blobs} of {named_text('layer', summary.layers)}, "
        f"{size_text(summary.expert_length)}",
        f"  dense     {dense}",
        f"  hotness   {hotness}",
        f"  files     {count_text(summary.file_count, 'file')}, {size_text(summary.data_length)} "
        f"with {summary.padding_share:.1%} padding; index {size_text(summary.index_length)}",
    ]
    if not summary.is_whole:
        verb = "is" if missing == ["the dense part"] else "are"
        left_out = f"{' and '.join(missing)} {verb} left out"
        lines.append(f"  whole     no, {left_out}: nothing can be restored from it")
    if summary.dry_run and summary.free_space is not None:
        lines.append(f"  free      {size_text(summary.free_space)}")
    if summary.in_place is not None:
        facts = summary.in_place
        units = f"{count_text(facts.unit_count, 'unit')} of up to {size_text(facts.unit_length)}"
        lines.append(f"  in place  {units}, {size_text(facts.extra_length)} have to be free")
        lines += [f"  refused   {refusal}" for refusal in facts.refusals]
    return "\n".join(lines)


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


def packed(summary: PackSummary) -> str:
    """Write the result of packing."""
    if summary.is_finished:
        return (
            f"{summary.path}: is there already, of shards with these names, lengths and headers; "
            f"{compared(summary.digests)}"
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
        text += f", {resumed} finished before: {compared(summary.digests)}"
    if summary.damaged_files:
        text += f"\n  damaged, and written anew: {', '.join(summary.damaged_files)}"
    if summary.missing_file_count is not None:
        left = "all files are written"
        if summary.missing_file_count:
            left = f"{count_text(summary.missing_file_count, 'file')} of other parts missing"
        text += f"\n  {left}; `moepack pack … --commit` makes a pack of them"
    return text


def ranked(summary: RankSummary) -> str:
    """Write the coverage of a new ranking."""
    if not summary.is_changed:
        return f"{summary.path}: has this ranking already"
    tokens = tokens_text(summary.hotness_token_count)
    return (
        f"{summary.path}: ranked again, {summary.measured_blob_count:,} of"
        f" {count_text(summary.blob_count, 'blob')} measured over {tokens}; in {summary.index_name}"
    )


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
    text += f"{_kept(summary.kept_length)}; {compared(summary.digests)}"
    if summary.sha256_count:
        text += f", {count_text(summary.sha256_count, 'shard')} the SHA-256 of the source"
    return f"{text}; the pack is gone" if summary.is_in_place else text


def _kept(length: int) -> str:
    return f", {size_text(length)} there already" if length else ""


def mounted(facts: MountFacts) -> Page:
    """Write the folder of the mounted shards, and the ways to unmount it."""
    count = count_text(len(facts.files), "shard")
    return Page(
        f"{facts.path}: {count}, {size_text(facts.length)}, read-only; nothing is stored",
        Verbatim(f"  Ctrl-C ends it, or: {facts.unmount}"),
    )


def format_facts(engine: Engine) -> list[tuple[str, str]]:
    """Return the facts about a format of exports, as rows of a term and a phrase."""
    return [
        ("reads", engine.reads),
        ("written", engine.writes),
        ("copied", engine.copies),
        ("proven", engine.proof),
    ]


def export_plan(summary: ExportSummary) -> Page:
    """Write what an export would write, and the space that it would take."""
    assert summary.needed_length is not None
    assert summary.free_space is not None
    lines = [
        f"{summary.path}: {_contents(summary)}",
        f"  takes     {size_text(summary.needed_length)}",
        f"  free      {size_text(summary.free_space)}",
        *(f"  note      {note}" for note in summary.notes),
    ]
    return Page(*lines, Verbatim(f"  then      {summary.command}"))


def exported(summary: ExportSummary) -> Page:
    """Write what an export has written, and how it is proven."""
    digests = "no byte of an expert was copied"
    if summary.is_copied:
        digests = compared(summary.digests)
    shared = summary.cloned_length
    text = f", {size_text(shared)} of it shared with the pack" if shared else ""
    text += _kept(summary.kept_length)
    notes: list[Block] = [f"  note: {note}" for note in summary.notes]
    return Page(f"{summary.path}: {_contents(summary)}{text}; {digests}", *notes)


def _contents(summary: ExportSummary) -> str:
    files = "" if summary.file_count == 1 else f" in {count_text(summary.file_count, 'file')}"
    tensors = count_text(summary.tensor_count, "tensor")
    return f"{tensors}{files}, {size_text(summary.length)}"


def fetching(plan: FetchPlan) -> str:
    """Write the address, the length and the new path of a model that is fetched to run it.

    And the length of all that were fetched before.
    """
    path, address = shorten(plan.path), shorten(plan.address)
    line = f"{address}: {size_text(plan.length)} come to {path}, once"
    if not plan.cache_length:
        return line
    cache = f"{shorten(plan.cache)} has {size_text(plan.cache_length)} of fetched models already"
    return f"{line}\n{cache}: remove those that are not wanted any more"


def pull_plan(summary: PullSummary) -> str:
    """Write the length of a pull, and where it comes from."""
    length = size_text(summary.length)
    if not summary.is_whole:
        length += f" of {size_text(summary.all_length)}"
    return f"{shorten(summary.path)}: {length} from {shorten(summary.origin)}"


def pulled(summary: PullSummary) -> str:
    """Write the result of a pull, and the experts that are missing."""
    there = f"{size_text(summary.fetched_length or 0)} pulled"
    if summary.kept_length:
        there += f", {size_text(summary.kept_length)} there already"
    if summary.mended_length:
        there += f", {size_text(summary.mended_length)} mended"
    there += f"; {compared(summary.digests)}"
    if summary.is_whole:
        return f"{shorten(summary.path)}: the whole pack, {there}"
    share, missing = _shares(summary)
    return f"{shorten(summary.path)}: {share} and the dense part, {there}\n  {missing}"


def repaired(summary: RepairSummary) -> str:
    """Write the damaged ranges of a pack, the origin of their bytes, and the bytes compared."""
    lines = [f"  {shorten(name)}" for name in summary.repaired[:_SHOWN]]
    if others := len(summary.repaired) - len(lines):
        lines.append(f"  … and {others:,} more: --json lists all")
    if summary.padding_length:
        lines.append(f"  {size_text(summary.padding_length)} of padding made right")
    written = "nothing was damaged"
    if summary.repaired:
        what = count_text(len(summary.repaired), "damaged range")
        written = f"{what}, {size_text(summary.written_length)} written"
        written += f" from {shorten(str(summary.origin))}"
    elif lines:
        written = "no part was damaged"
    count = summary.digests.compared_length
    first = f"{shorten(summary.path)}: {written}; {size_text(count)} compared"
    return "\n".join([f"{first}, {compared(summary.digests)}", *lines])


def partial(facts: PartialFacts) -> str:
    """Write the share of a partial pack that is there."""
    share, missing = _shares(facts)
    return f"{share}, {size_text(facts.length)}; {missing}"


def _shares(facts: PartialFacts | PullSummary) -> tuple[str, str]:
    """Write the share of experts that is there, and the rest, with the layers that have none."""
    layers = facts.missing_layers
    of_layers = f", all of {named_text('layer', layers)} among them" if layers else ""
    missing = facts.all_expert_count - facts.expert_count
    verb = "is" if missing == 1 else "are"
    return (
        f"{facts.expert_count:,} of {count_text(facts.all_expert_count, 'expert')}",
        f"{count_text(missing, 'expert')} {verb} missing{of_layers}, and read from "
        f"{shorten(facts.origin)}",
    )


def mirror(facts: MirrorFacts) -> str:
    """Write the path and the length of a mirror, or the reason why it is not read."""
    path = shorten(str(facts.path))
    if facts.problem is not None:
        return f"{path}: not read: {shorten(facts.problem)}"
    assert facts.length is not None
    hottest = "" if facts.hottest is None else f", the hottest {size_text(facts.hottest)}"
    return f"{path}: {size_text(facts.length)} of {size_text(facts.data_length)}{hottest}"


def mirrored(summary: MirrorSummary) -> str:
    """Write the result of mirroring."""
    kept = f", {size_text(summary.kept_length)} of it kept" if summary.kept_length else ""
    experts = count_text(summary.expert_count, "expert")
    lines = [
        f"{shorten(summary.path)}: {experts}, {size_text(summary.length)} of"
        f" {size_text(summary.all_length)}{kept}; read back: {compared(summary.digests)}"
    ]
    if summary.is_same_drive:
        lines.append("  it is on the same drive as the pack: nothing is gained by it")
    return "\n".join(lines)


def mirror_removed(summary: RemovedMirror) -> str:
    """Write the result of a removal."""
    if summary.is_removed:
        return f"{shorten(summary.path)}: removed"
    left = f"whatever was in {shorten(summary.path)} is left there"
    return f"{shorten(summary.pack)}: no longer has a mirror; {left}"
