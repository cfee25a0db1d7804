"""The manifest against the index: whether both belong together."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moepack.common import digest
from moepack.common.errors import ErrorCode, PackError
from moepack.common.escaping import shorten
from moepack.common.sizes import ranges_text
from moepack.pack.format import manifest, records
from moepack.pack.format.index import Index
from moepack.pack.format.manifest import FileEntry, IndexEntry, Manifest
from moepack.pack.format.tables import DataFile
from moepack.pack.reading.directory import is_replaced, map_index, read_any_manifest
from moepack.pack.verifying.checked_pack import CheckedPack
from moepack.pack.verifying.report import Findings


def open_pack(folder: Path, findings: Findings) -> tuple[Manifest | None, CheckedPack | None]:
    """Decode the manifest and the index of a pack, and check whether both belong together.

    Returns None for an undecodable manifest, and for a pack without an index, which are findings.
    Raises PackError if there is no pack, if its index is no regular file, and for an undamaged one
    of a format that this version does not know.
    """
    name, data, partial = read_any_manifest(folder)
    try:
        described = manifest.decode(data, str(name))
    except PackError as error:
        if error.code is ErrorCode.UNKNOWN_FORMAT:
            raise
        findings.add_error("manifest", error, file=manifest.NAME)
        return None, None
    of_this = Findings()
    if not described.digest_matches:
        of_this.add("manifest", "its own digest differs", file=manifest.NAME)
    index = _open_index(folder, described, of_this)
    if of_this.all and is_replaced(folder, data):
        return open_pack(folder, findings)
    findings.all += of_this.all
    if index is None:
        return described, None
    for message in _disagreements(index, described):
        findings.add("manifest", message, file=manifest.NAME)
    return described, CheckedPack(folder, described, partial, index, findings)


def _open_index(path: Path, described: Manifest, findings: Findings) -> Index | None:
    """Decode the index of the pack at `path`; None if it cannot be, which is a finding."""
    name = described.index_entry.name
    try:
        data: Any = map_index(path, described.index_entry)
    except PackError as error:
        if error.code is ErrorCode.NOT_REGULAR:
            raise
        findings.add_error("index", error, file=name)
        return None
    index = None
    with memoryview(data) as view:
        computed = digest.xxh3(view[: -records.TRAILER.size])
        try:
            index = Index(data, str(path / name))
        except PackError as error:
            is_described = computed == described.index_entry.digest
            if error.code is ErrorCode.UNKNOWN_FORMAT and is_described:
                raise
            findings.add_error("index", error, file=name)
        _check_bytes(view, computed, index is not None, described.index_entry, findings)
    return index


def _check_bytes(
    data: memoryview, computed: int, is_decoded: bool, entry: IndexEntry, findings: Findings
) -> None:
    """Check the index's bytes; one that is sound by itself is not damaged, but of another pack."""
    trailer = data[-records.TRAILER.size :].tobytes()
    is_sound = is_decoded and trailer == records.TRAILER.pack(computed)
    is_described = (computed, len(data)) == (entry.digest, entry.length)
    if not is_described:
        ours = f"{len(data):,} bytes with the digest {digest.to_text(computed)}"
        theirs = f"{entry.length:,} bytes with the digest {digest.to_text(entry.digest)}"
        if is_sound:
            message = f"it describes an index of {theirs}, this one has {ours}"
            findings.add("manifest", message, file=manifest.NAME)
            return
        message = f"it has {ours}, the manifest says {theirs}"
        findings.add("index", message, file=entry.name)
    elif is_decoded and not is_sound:
        message = "its trailer is not the digest of the bytes before it"
        findings.add("index", message, file=entry.name)
    if not is_described or not is_decoded:
        return
    if is_sound and entry.sha256 is not None:
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != entry.sha256:
            message = f"the SHA-256 of {entry.name} is {sha256}, index.sha256 is {entry.sha256}"
            findings.add("manifest", message, file=manifest.NAME)
    kind, file = ("manifest", manifest.NAME) if is_sound else ("index", entry.name)
    for number, expected in enumerate(entry.page_digests or ()):
        start = number * manifest.PAGE_LENGTH
        if digest.xxh3(data[start : start + manifest.PAGE_LENGTH]) != expected:
            message = f"page {number:,} of the index does not have the digest in the manifest"
            findings.add(kind, message, file=file, offset=start)


def _disagreements(index: Index, described: Manifest) -> Iterator[str]:
    """Yield everything that manifest and index say otherwise of the pack."""
    yield from _differing_files(index.files, described.files)
    has_all = index.is_whole and described.layers is None
    if described.is_whole != has_all:
        claim = "whole" if described.is_whole else "not whole"
        content = "all of it" if has_all else "a part of the source"
        yield f"it says that the pack is {claim}, the index holds {content}"
    layers = sorted({family.layer for family in index.families})
    if described.layers is not None and described.layers != layers:
        listed = ", ".join(map(str, described.layers))
        yield f"it lists layers {shorten(listed)}, the index holds {ranges_text(layers)}"
    for family in index.families:
        used = described.source.experts_used_in(family.name, family.layer)
        if used is not None and used > family.expert_count:
            yield (
                f"a token uses {used:,} experts of {family.name} in layer {family.layer}, "
                f"the index has {family.expert_count:,}"
            )
    yield from _differing_hotness(index, described)


def _differing_files(indexed: Sequence[DataFile], files: Sequence[FileEntry]) -> Iterator[str]:
    if len(files) != len(indexed):
        yield f"it lists {len(files):,} files, the index {len(indexed):,}"
    for number, (ours, theirs) in enumerate(zip(files, indexed, strict=False)):
        if (ours.name, ours.length) != (theirs.name, theirs.length):
            texts = [f"{file.name} of {file.length:,} bytes" for file in (ours, theirs)]
            yield f"it lists other files: file {number} is {texts[0]}, in the index {texts[1]}"


def _differing_hotness(index: Index, described: Manifest) -> Iterator[str]:
    measured = sum(family.expert_count for family in index.families if family.hotness_measured)
    if described.hotness is None:
        if measured:
            yield f"it knows of no hotness, the index has that of {measured:,} blobs"
        return
    counts = {"measured_blob_count": measured, "blob_count": index.blob_count}
    for key, count in counts.items():
        value = described.hotness.get(key)
        if value is not None and (type(value) is not int or value != count):
            yield f"hotness.{key} is {shorten(json.dumps(value))}, the index has {count:,}"
