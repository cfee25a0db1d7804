"""A pack that is there already, and that packing would only make once more."""

import os
from dataclasses import replace

from moepack.common.errors import PackError
from moepack.common.paths import AnyPath, is_remote
from moepack.common.phases import DigestCounts
from moepack.pack.format import manifest
from moepack.pack.format.manifest import Manifest
from moepack.pack.reading.pack import Pack
from moepack.packing.plan.pack_summary import PackSummary, from_pack
from moepack.packing.writing.planned_pack import PlannedPack

_HINT = "remove the pack, and run the same again: the source is here"


def finished_pack(
    planned: PlannedPack, target: AnyPath, *, sha256: bool, strong: bool
) -> PackSummary | None:
    """Return the summary of the pack in `target` if it is the planned one; None for another.

    That is told by its manifest, and the lengths of files on this machine. With `sha256` it has to
    state the SHA-256 of all shards, with `strong` that of its index. The version that wrote it does
    not matter. Raises PackError for a pack that cannot be opened, or has lost bytes.
    """
    with Pack(target) as opened:
        described = opened.manifest
        if not _is_planned(described, planned, sha256=sha256, strong=strong):
            return None
        if not is_remote(target):
            for entry, path in zip(described.files, opened.file_paths, strict=True):
                _check_length(os.fspath(path), entry.length)
        length = sum(entry.length for entry in described.files)
    digests = DigestCounts(known_length=length)
    return replace(from_pack(target), is_finished=True, written_length=0, digests=digests)


def _is_planned(described: Manifest, planned: PlannedPack, *, sha256: bool, strong: bool) -> bool:
    """Return whether a manifest says what that of the planned pack would, and has what is asked."""
    sha256_by_name = {shard.name: shard.sha256 for shard in described.source.shards}
    if sha256 and not all(sha256_by_name.values()):
        return False
    if strong and described.index_entry.sha256 is None:
        return False
    shards = tuple(
        shard._replace(sha256=shard.sha256 or sha256_by_name.get(shard.name))
        for shard in planned.described.shards
    )
    expected = planned.to_manifest(described.index_entry)._replace(
        tool=described.tool, source=planned.described._replace(shards=shards)
    )
    return manifest.encode(expected) == manifest.encode(described)


def _check_length(path: str, length: int) -> None:
    if not os.path.isfile(path):
        raise PackError("a data file is missing", path=path, hint=_HINT)
    if (actual_length := os.path.getsize(path)) != length:
        raise PackError(
            "the file is not as long as the manifest says",
            path=path,
            expected=f"{length:,} bytes",
            found=f"{actual_length:,}",
            hint=_HINT,
        )
