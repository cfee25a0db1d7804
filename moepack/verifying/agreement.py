"""Whether manifest and index belong together: what both say has to be the same."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moepack import digest
from moepack.errors import PackError
from moepack.escaping import short
from moepack.format import manifest, records
from moepack.format.index import Index
from moepack.format.manifest import IndexEntry, Manifest
from moepack.reading.directory import map_index
from moepack.sizes import ranges_text
from moepack.verifying.report import Findings


def open_index(path: Path, described: Manifest, findings: Findings) -> Index | None:
    """Decode the index of the pack at `path`; what keeps it from being decoded is a finding.

    Raises PackError where it is no regular file, and where it is of a format that this version does
    not know, and that is no damage.
    """
    name = described.index_entry.name
    try:
        data: Any = map_index(path / name)
    except PackError as error:
        if error.place == "kind of file":
            raise
        findings.add_error("index", error, file=name)
        return None
    index = None
    try:
        index = Index(data, str(path / name))
    except PackError as error:
        is_newer = "newer" in (error.hint or "") and _is_described(data, described)
        if is_newer:
            raise
        findings.add_error("index", error, file=name)
    with memoryview(data) as view:
        _check_bytes(view, index is not None, described.index_entry, findings)
    return index


def _is_described(data: Any, described: Manifest) -> bool:
    with memoryview(data) as view:
        return digest.of(view[: -records.TRAILER.size]) == described.index_entry.digest


def _check_bytes(data: memoryview, is_decoded: bool, entry: IndexEntry, findings: Findings) -> None:
    """Check the index's bytes; one that is sound by itself is not damaged, but of another pack."""
    trailer = data[-records.TRAILER.size :].tobytes()
    computed = digest.of(data[: -records.TRAILER.size])
    is_sound = is_decoded and trailer == records.TRAILER.pack(computed)
    is_described = (computed, len(data)) == (entry.digest, entry.length)
    if not is_described:
        ours, theirs = (
            f"{length:,} bytes with the digest {digest.to_text(known)}"
            for length, known in ((len(data), computed), (entry.length, entry.digest))
        )
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
    is_right = is_sound
    if is_right and entry.sha256 is not None:
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != entry.sha256:
            message = f"the SHA-256 of {entry.name} is {sha256}, index.sha256 is {entry.sha256}"
            findings.add("manifest", message, file=manifest.NAME)
    kind, file = ("manifest", manifest.NAME) if is_right else ("index", entry.name)
    for number, expected in enumerate(entry.page_digests or ()):
        start = number * manifest.PAGE_LENGTH
        if digest.of(data[start : start + manifest.PAGE_LENGTH]) != expected:
            message = (
                f"page {number:,} of the index does not have the digest that the manifest says"
            )
            findings.add(kind, message, file=file, offset=start)


def check(index: Index, described: Manifest, findings: Findings) -> None:
    """Check what both the manifest and the index say of the pack."""
    agreement = _Agreement(index, described, findings)
    agreement.files()
    agreement.whole()
    agreement.layers()
    agreement.experts_used()
    agreement.hotness()


class _Agreement:
    def __init__(self, index: Index, described: Manifest, findings: Findings) -> None:
        self.index = index
        self.manifest = described
        self.findings = findings

    def find(self, message: str) -> None:
        self.findings.add("manifest", message, file=manifest.NAME)

    def files(self) -> None:
        listed = [(entry.name, entry.length) for entry in self.manifest.files]
        held = [(file.name, file.length) for file in self.index.files]
        if len(listed) != len(held):
            self.find(f"it lists {len(listed):,} files, the index {len(held):,}")
        for number, (ours, theirs) in enumerate(zip(listed, held, strict=False)):
            if ours != theirs:
                texts = [f"{name} of {length:,} bytes" for name, length in (ours, theirs)]
                self.find(f"it lists other files: file {number} is {texts[0]}, in the index "
                          f"{texts[1]}")  # fmt: skip

    def whole(self) -> None:
        holds_all = self.index.is_whole and self.manifest.layers is None
        if self.manifest.is_whole != holds_all:
            claims = "whole" if self.manifest.is_whole else "not whole"
            held = "all of it" if holds_all else "a part of the source"
            self.find(f"it says that the pack is {claims}, the index holds {held}")

    def layers(self) -> None:
        chosen = self.manifest.layers
        held = sorted({family.layer for family in self.index.families})
        if chosen is not None and chosen != held:
            listed = ", ".join(map(str, chosen))
            self.find(f"it lists layers {short(listed)}, the index holds {ranges_text(held)}")

    def experts_used(self) -> None:
        for family in self.index.families:
            used = self.manifest.source.experts_used_in(family.name, family.layer)
            if used is not None and used > family.expert_count:
                self.find(
                    f"a token uses {used:,} experts of {family.name} in layer {family.layer}, "
                    f"the index has {family.expert_count:,}"
                )

    def hotness(self) -> None:
        measured = sum(f.expert_count for f in self.index.families if f.hotness_measured)
        hotness: Mapping[str, Any] | None = self.manifest.hotness
        if hotness is None:
            if measured:
                self.find(f"it knows of no hotness, the index has that of {measured:,} blobs")
            return
        for key, held in (
            ("measured_blob_count", measured),
            ("blob_count", self.index.blob_count),
        ):
            value = hotness.get(key)
            if value is not None and (type(value) is not int or value != held):
                self.find(f"hotness.{key} is {short(json.dumps(value))}, the index has {held:,}")
