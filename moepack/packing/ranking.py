"""Rank the experts of a pack anew, by other hotness: the blobs stay where they are.

The order of events is the promise:

1. the new index is written under a name of its own, synced, and read back;
2. the manifest that names it is written under a temporary name, synced, and renamed to its own:
   this is the commit, of index and manifest at once; the directory is synced;
3. the old index is removed.

A crash before the rename leaves the pack as it was, one after it leaves the new ranking; what else
it leaves, the next ranking removes. Who has the pack open goes on with the old index.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moepack import digest, strict_json
from moepack.errors import MachineError, PackError, write_failure
from moepack.format import manifest, records
from moepack.format.index import Index
from moepack.format.names import JOURNAL_NAME
from moepack.hotness.model import Hotness
from moepack.keys import ExpertKey
from moepack.packing.chosen_hotness import load_hotness
from moepack.packing.line_log import open_log
from moepack.reading.pack import Pack
from moepack.shape import CHUNK_FAMILY, ROUTED_FAMILY
from moepack.storage.atomic import sync_directory, write_synced
from moepack.storage.page_cache import drop

_INDEX_NAME = re.compile(r"index-[0-9a-f]{16}\.bin\Z")
_TEMPORARY_NAME = f"{manifest.NAME}.tmp"


@dataclass(frozen=True, slots=True)
class RankSummary:
    """A new ranking: the name of its index, and how many blobs it covers.

    `hotness_token_count` is None if it is not known, `is_changed` false if the pack had this very
    ranking already.
    """

    path: str
    index_name: str
    blob_count: int
    measured_blob_count: int
    hotness_token_count: int | None
    is_changed: bool


class Family(Protocol):
    """A family of experts, as a source or a pack knows it."""

    @property
    def layer(self) -> int:
        """Its layer."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def expert_count(self) -> int:
        """How many experts it has."""


def is_measured(family: Family, routed_count: int | None, hotness: Hotness | None) -> bool:
    """Return whether hotness says how hot the experts of a family are.

    `routed_count` is how many experts the routed family of the layer has, None without one. Chunk
    experts are counted if it is known which experts they serve.
    """
    if hotness is None or not any(layer == family.layer for layer, _ in hotness.counts):
        return False
    if family.name == ROUTED_FAMILY:
        return True
    return family.name == CHUNK_FAMILY and (routed_count or 1) % family.expert_count == 0


def count_of(family: Family, routed_count: int | None, hotness: Hotness, expert: int) -> int:
    """Return the hotness of one expert; a chunk expert's follows from those that it serves."""
    if family.name == ROUTED_FAMILY:
        return hotness.counts.get(ExpertKey(family.layer, expert), 0)
    size = (routed_count or 1) // family.expert_count
    return hotness.chunk_count(family.layer, expert, size)


def rank_pack(
    pack: str | os.PathLike[str], hotness: str | os.PathLike[str] | Hotness
) -> RankSummary:
    """Give the pack `pack` the ranking and the counts of other hotness; no blob is moved.

    `hotness` is a file of counts, a trace, or an imatrix. Raises PackError for a pack that is
    damaged, TraceError for hotness of another model, MoepackError if another process writes to the
    pack, MachineError for a machine that fails.
    """
    path = Path(pack)
    with Pack(path) as opened:
        counted = load_hotness(hotness, opened.shape)
        assert counted is not None
        index = _ranked(opened.index, counted)
        old, blob_count = opened.manifest.index_entry, opened.index.blob_count
    data, name = _manifest(path, index, counted)
    measured = sum(_measured_counts(Index(index, name)))
    try:
        with contextlib.closing(open_log(path / JOURNAL_NAME)) as lock:
            _remove_leftovers(path, old.name)
            is_changed = (path / manifest.NAME).read_bytes() != data
            if is_changed:
                _commit(path, data, name, index)
            if name != old.name:
                _remove(path / old.name)
            lock.remove()
    except OSError as error:
        hint = "run the same command again: the pack has its old ranking, or the new one"
        raise write_failure(error, path, hint) from error
    return RankSummary(
        path=os.fspath(pack),
        index_name=name,
        blob_count=blob_count,
        measured_blob_count=measured,
        hotness_token_count=counted.token_count,
        is_changed=is_changed,
    )


def _ranked(index: Index, hotness: Hotness) -> bytes:
    """Return an index with other counts and ranks."""
    ranked = bytearray(index.data)
    routed = {f.layer: f.expert_count for f in index.families if f.name == ROUTED_FAMILY}
    counts: list[int] = []
    blobs = index.directory["blobs"]
    for number, family in enumerate(index.families):
        routed_count = routed.get(family.layer)
        measured = is_measured(family, routed_count, hotness)
        at = index.directory["families"].at(number)
        record = records.FamilyRecord.unpack(ranked, at)
        flags = records.HOTNESS_MEASURED if measured else 0
        _put(ranked, at, record._replace(flags=flags).pack())
        for expert in range(family.expert_count):
            count = count_of(family, routed_count, hotness, expert) if measured else -1
            counts.append(count)
    order = sorted(range(index.blob_count), key=lambda blob: -counts[blob])
    for rank, blob in enumerate(order):
        place, length, _, _, file = index.blob(blob)
        record_bytes = records.BLOB.pack(place, length, max(counts[blob], 0), rank, file)
        _put(ranked, blobs.at(blob), record_bytes)
        _put(ranked, index.directory["ranks"].at(rank), records.RANK.pack(blob))
    body = memoryview(ranked)[: -records.TRAILER.size]
    trailer = records.TRAILER.pack(digest.of(body))
    return bytes(body) + trailer


def _put(data: bytearray, at: int, record: bytes) -> None:
    """Write the fields of a record that are known here; what a longer one has stays."""
    data[at : at + len(record)] = record


def _measured_counts(index: Index) -> list[int]:
    return [family.expert_count for family in index.families if family.hotness_measured]


def _manifest(path: Path, index: bytes, hotness: Hotness) -> tuple[bytes, str]:
    """Return the manifest with another index and hotness, and the name of the index.

    All other keys stay, those of others among them.
    """
    body: dict[str, Any] = strict_json.parse((path / manifest.NAME).read_bytes())
    decoded = Index(index, str(path))
    entry = manifest.describe_index(index)
    old = body["index"]
    name = f"index-{entry.digest:016x}.bin"
    if old.get("digest") == digest.to_text(entry.digest):
        name = old["name"]
    sha256 = hashlib.sha256(index).hexdigest() if old.get("sha256") else None
    body["index"] = old | entry._replace(name=name, sha256=sha256).to_json()
    counts = {
        "measured_blob_count": sum(_measured_counts(decoded)),
        "blob_count": decoded.blob_count,
    }
    body["hotness"] = hotness.to_json() | counts
    del body["manifest_digest"]
    return manifest.seal(body), name


def _commit(path: Path, data: bytes, name: str, index: bytes) -> None:
    if not (path / name).exists():
        write_synced(path / name, index)
    write_synced(path / _TEMPORARY_NAME, data)
    sync_directory(path)
    for written, expected in ((name, index), (_TEMPORARY_NAME, data)):
        drop([path / written])
        if (path / written).read_bytes() != expected:
            problem = "what is read back from the drive is not what was written"
            hint = "the drive or the memory is failing: the pack is as it was"
            raise MachineError(problem, path=path / written, hint=hint)
    manifest.decode(data, str(path / manifest.NAME))
    os.replace(path / _TEMPORARY_NAME, path / manifest.NAME)
    sync_directory(path)


def _remove_leftovers(path: Path, current: str) -> None:
    """Remove what an interrupted ranking left; raise PackError if the pack changed meanwhile."""
    described = manifest.decode((path / manifest.NAME).read_bytes(), str(path))
    if described.index_entry.name != current:
        hint = "run the same command again"
        raise PackError("another process ranked it meanwhile", path=path, hint=hint)
    # A data file may have a name that looks like an index's.
    kept = {current.lower(), *(file.name.lower() for file in described.files)}
    for name in os.listdir(path):
        is_old = _INDEX_NAME.match(name) or name in (manifest.INDEX_NAME, _TEMPORARY_NAME)
        if is_old and name.lower() not in kept:
            _remove(path / name)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    sync_directory(path.parent)
