"""Rank the experts of a pack anew, by other hotness; no blob is moved.

The order of events is the promise:

1. the new index is written under a name of its own, synced, and read back;
2. the manifest that names it is written under a temporary name, synced, and renamed to its own:
   this is the commit, of index and manifest at once; the directory is synced;
3. the old index is removed.

A crash before the rename leaves the pack as it was, one after it leaves the new ranking; other
leftovers are removed by the next ranking. Open readers keep the old index.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.common import digest
from moepack.common.errors import PackError, write_failure
from moepack.common.fields import parse_strictly
from moepack.common.pack_files import JOURNAL_NAME
from moepack.pack.format import manifest, records
from moepack.pack.format.index import Index
from moepack.pack.reading.directory import read_manifest
from moepack.pack.reading.pack import Pack
from moepack.packing.plan.blob_hotness import family_counts, load_hotness
from moepack.packing.writing.commit import TEMPORARY_NAME, commit
from moepack.packing.writing.lock_file import LockFile
from moepack.storage.atomic import sync_directory
from moepack.traces.hotness.model import Hotness

_INDEX_NAME = re.compile(r"index-[0-9a-f]{16}\.bin\Z")


@dataclass(frozen=True, slots=True)
class RankSummary:
    """A new ranking: the name of its index, and how many blobs it covers.

    If not `is_changed`, the pack had this very ranking already.
    """

    path: str
    index_name: str
    blob_count: int
    measured_blob_count: int
    hotness_token_count: int | None
    is_changed: bool


def rank_pack(
    pack: str | os.PathLike[str], hotness: str | os.PathLike[str] | Hotness
) -> RankSummary:
    """Rank the experts of `pack` by other hotness, and replace its counts; no blob is moved.

    `hotness` is a file of counts, a trace, or an imatrix. Raises PackError for a damaged pack,
    TraceError for hotness of another model, MoepackError if another process writes to the pack,
    MachineError for a machine that fails.
    """
    with Pack(pack) as opened:
        opened.require_files()
        opened.require_complete()
        path = opened.path
        checked = load_hotness(hotness, opened.shape)
        assert checked is not None
        index = rank(opened.index, checked)
        old_name, blob_count = opened.manifest.index_entry.name, opened.index.blob_count
    described = describe_hotness(checked, Index(index, str(path)))
    data, name = _manifest(path, index, described)
    try:
        with contextlib.closing(LockFile(path / JOURNAL_NAME)) as lock:
            try:
                _remove_leftovers(path, old_name)
                is_changed = read_manifest(path) != data
                if is_changed:
                    manifest.decode(data, str(path / manifest.NAME))
                    commit(path, name, index, data)
                if name != old_name:
                    _remove(path / old_name)
            finally:  # whoever was overtaken leaves nothing either
                lock.remove()
    except OSError as error:
        hint = "run the same command again: the pack has its old ranking, or the new one"
        raise write_failure(error, path, hint) from error
    return RankSummary(
        path=os.fspath(pack),
        index_name=name,
        blob_count=blob_count,
        measured_blob_count=described["measured_blob_count"],
        hotness_token_count=checked.token_count,
        is_changed=is_changed,
    )


def rank(index: Index, hotness: Hotness) -> bytes:
    """Return an index with other counts and ranks."""
    ranked = bytearray(index.data)
    counts: list[int] = []
    blobs = index.directory["blobs"]
    for number, of_family in enumerate(family_counts(index.families, hotness)):
        at = index.directory["families"].at(number)
        record = records.FamilyRecord._make(records.FAMILY.unpack_from(ranked, at))
        flags = 0 if of_family is None else records.HOTNESS_MEASURED
        _put(ranked, at, records.FAMILY.pack(*record._replace(flags=flags)))
        counts += of_family or [-1] * record.expert_count
    order = sorted(range(index.blob_count), key=lambda blob: -counts[blob])
    for rank, blob in enumerate(order):
        offset, length, _, _, file = index.blob(blob)
        record_bytes = records.BLOB.pack(offset, length, max(counts[blob], 0), rank, file)
        _put(ranked, blobs.at(blob), record_bytes)
        _put(ranked, index.directory["ranks"].at(rank), records.RANK.pack(blob))
    body = memoryview(ranked)[: -records.TRAILER.size]
    return bytes(body) + records.TRAILER.pack(digest.xxh3(body))


def describe_hotness(hotness: Hotness, index: Index) -> dict[str, Any]:
    """Return the hotness that ranks the blobs of an index, for the manifest."""
    measured = sum(family.expert_count for family in index.families if family.hotness_measured)
    counts = {"measured_blob_count": measured, "blob_count": index.blob_count}
    return hotness.to_json() | counts


def _put(data: bytearray, at: int, record: bytes) -> None:
    """Replace the fields of a record that this version knows; a longer record keeps the rest."""
    data[at : at + len(record)] = record


def _manifest(path: Path, index: bytes, hotness: dict[str, Any]) -> tuple[bytes, str]:
    """Return the manifest with another index and hotness, and the name of the index.

    All other keys stay, those of other programs among them.
    """
    body = parse_strictly(read_manifest(path))
    entry = manifest.describe_index(index)
    old = body["index"]
    name = f"index-{entry.digest:016x}.bin"
    if old.get("digest") == digest.to_text(entry.digest):
        name = old["name"]
    sha256 = hashlib.sha256(index).hexdigest() if old.get("sha256") else None
    body["index"] = old | entry._replace(name=name, sha256=sha256).to_json()
    body["hotness"] = hotness
    del body["manifest_digest"]
    return manifest.seal(body), name


def _remove_leftovers(path: Path, current: str) -> None:
    """Remove the leftovers of an interrupted ranking; raise PackError if the pack has changed."""
    described = manifest.decode(read_manifest(path), str(path))
    if described.index_entry.name != current:
        hint = "run the same command again"
        raise PackError("another process ranked it meanwhile", path=path, hint=hint)
    # A data file may have a name that looks like an index's.
    kept = {current.lower(), *(file.name.lower() for file in described.files)}
    for name in os.listdir(path):
        is_old = _INDEX_NAME.match(name) or name in (manifest.INDEX_NAME, TEMPORARY_NAME)
        if is_old and name.lower() not in kept:
            _remove(path / name)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    sync_directory(path.parent)
