"""Whether manifest and index belong together: what both say has to be the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moepack import digest
from moepack.errors import PackError
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.manifest import Manifest
from moepack.reading.directory import map_index
from moepack.sizes import ranges_text
from moepack.verifying.report import Findings


def open_index(path: Path, described: Manifest, findings: Findings) -> Index | None:
    """Decode the index of the pack at `path`; what keeps it from being decoded is a finding.

    Raises PackError where this version does not know the format, or there is no regular file.
    """
    name = manifest.INDEX_NAME
    data: Any = b""
    index = None
    try:
        data = map_index(path)
        index = Index(data, str(path / name))
        _check_digests(index, described.index_entry.digest, findings)
    except PackError as error:
        if error.place in ("format_version", "kind of file") or "newer" in (error.hint or ""):
            raise
        findings.add_error("index", error, file=name)
    _check_pages(data, described, findings)
    return index


def _check_digests(index: Index, expected: int, findings: Findings) -> None:
    for which, actual in (("stored", index.stored_digest), ("computed", index.computed_digest())):
        if actual != expected:
            message = f"its {which} digest is {digest.to_text(actual)}, "
            message += f"the manifest says {digest.to_text(expected)}"
            findings.add("index", message, file=manifest.INDEX_NAME)


def _check_pages(data: Any, described: Manifest, findings: Findings) -> None:
    """Check length and pages; where a length is wrong, its last pages cannot be right."""
    entry = described.index_entry
    if entry.length != len(data):
        message = f"it is {len(data):,} bytes long, the manifest says {entry.length:,}"
        findings.add("index", message, file=manifest.INDEX_NAME)
        return
    with memoryview(data) as view:
        for number, expected in enumerate(entry.page_digests or ()):
            start = number * manifest.PAGE_LENGTH
            if digest.of(view[start : start + manifest.PAGE_LENGTH]) != expected:
                message = f"page {number:,} does not have the digest that the manifest states"
                findings.add("index", message, file=manifest.INDEX_NAME, offset=start)


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
        if chosen is not None and sorted(chosen) != held:
            ours, theirs = ranges_text(sorted(chosen)), ranges_text(held)
            self.find(f"it lists layers {ours}, the index holds {theirs}")

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
            if key in hotness and hotness[key] != held:
                self.find(f"hotness.{key} is {hotness[key]}, the index has {held:,}")
