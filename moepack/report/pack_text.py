"""What packing, indexing, restoring and exporting came to, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.sizes import count_text, ranges_text, size_text

if TYPE_CHECKING:  # these rooms bring numpy, and most commands write without them
    from moepack.engines.stock_gguf import ExportSummary
    from moepack.packing.pack_model import PackSummary
    from moepack.packing.restore import RestoreSummary
    from moepack.packing.shard_index import IndexSummary

UNKNOWN = "–"


def plan(summary: PackSummary) -> str:
    """Write what a pack will be."""
    lines = [
        f"{summary.path}: layout {summary.layout}, in the order of {_order(summary)}",
        f"  experts   {count_text(summary.blob_count, 'blob')} of layers "
        f"{ranges_text(summary.layers)}, {size_text(summary.expert_length)}",
        f"  dense     {_dense(summary.dense_length)}",
        f"  hotness   {_hotness(summary)}",
        f"  files     {count_text(summary.file_count, 'file')}, {size_text(summary.data_length)} "
        f"with {summary.padding_share:.1%} padding; index {size_text(summary.index_length)}",
        f"  free      {size_text(summary.free_space)}",
    ]
    return "\n".join(lines)


def _order(summary: PackSummary) -> str:
    return "hotness" if summary.order == "hotness" else "the source"


def _dense(length: int | None) -> str:
    if length is None:
        return "left out: the source stays needed"
    return f"{size_text(length)}, and the headers of the shards"


def _hotness(summary: PackSummary) -> str:
    if summary.measured_blob_count is None:
        return "none given"
    tokens = summary.hotness_token_count
    over = "an unknown number of tokens" if tokens is None else count_text(tokens, "token")
    share = f"{summary.measured_blob_count:,} of {count_text(summary.blob_count, 'blob')}"
    return f"{share} measured, over {over}"


def packed(summary: PackSummary) -> str:
    """Write how packing went, and what comes next."""
    if summary.written_length is None:
        return "nothing was written"
    resumed = summary.resumed_file_count or 0
    lines = [
        f"{summary.path}: {count_text(summary.file_count - resumed, 'file')}, "
        f"{size_text(summary.written_length)} written{_speed(summary)}"
        + (f", {resumed} taken over" if resumed else "")
    ]
    if summary.is_whole:
        lines.append(f"next: moepack verify {summary.path} --source SOURCE")
    return "\n".join(lines)


def _speed(summary: PackSummary) -> str:
    seconds = summary.seconds
    if not seconds or summary.written_length is None:
        return ""
    return f" in {seconds:.1f} s ({size_text(int(summary.written_length / seconds))}/s)"


def indexed(summary: IndexSummary) -> str:
    """Write what an index covers."""
    digests = "with digests" if summary.has_digests else "without digests"
    return (
        f"{summary.path}: {count_text(summary.blob_count, 'expert')} of layers "
        f"{ranges_text(summary.layers)} in {count_text(len(summary.files), 'shard')}, {digests}; "
        f"nothing was copied\n"
        f"  the shards have to stay where they are: it has links to them"
    )


def restored(summary: RestoreSummary) -> str:
    """Write which shards were restored, and how they were proven."""
    proven = _proven(summary)
    if summary.sha256_count:
        proven += f", {count_text(summary.sha256_count, 'shard')} the SHA-256 of the source"
    count = count_text(len(summary.files), "shard")
    return f"{summary.path}: {count}, {_how(summary)}; {proven}"


def exported(summary: ExportSummary) -> str:
    """Write what was exported."""
    count = count_text(summary.tensor_count, "tensor")
    return f"{summary.path}: {count}, {_how(summary)}; {_proven(summary)}"


def _proven(summary: RestoreSummary | ExportSummary) -> str:
    return "every part had its digest" if summary.has_digests else "digests are not known"


def _how(summary: RestoreSummary | ExportSummary) -> str:
    ways = [size_text(summary.length)]
    if summary.cloned_length:
        ways.append(f"{size_text(summary.cloned_length)} of it shared with the pack")
    if summary.kept_length:
        ways.append(f"{size_text(summary.kept_length)} there already")
    return ", ".join(ways)
