"""Verify a pack: its structure, its padding, every digest, and every byte against the source.

Verification shares the index decoder with the reader and nothing with the packer: where the slices
lie in the shards it learns from `witness`. It gives back all findings and stops at none, as long as
the manifest and the tables of the index can be read at all.
"""

import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moepack import digest
from moepack.errors import PackError, SourceError, short
from moepack.format import manifest
from moepack.format.index import Index, PackedFamily, PartKind
from moepack.format.records import BlobRecord, PartRecord
from moepack.reading.directory import map_index, read_manifest
from moepack.verifying.file_scan import Extent, FileScan
from moepack.verifying.report import Finding, Report
from moepack.verifying.witness import Slices, find_slices

DEFAULT_THREADS = 4

Expected = dict[tuple[int, str], Slices]


def verify(
    path: str | os.PathLike[str],
    shard_paths: Sequence[str] | None = None,
    *,
    threads: int = DEFAULT_THREADS,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Verify the pack at `path`, against the source's shards (in order) where they are given.

    `progress` is called with the bytes read since its last call, from one thread at a time. Raises
    PackError where there is no pack or one of an unknown version, SourceError where a shard cannot
    be read; everything else that is wrong is a finding.
    """
    pack = Path(path)
    name = pack / manifest.NAME
    described = manifest.decode(read_manifest(pack), str(name))
    check = _Check(pack, described)
    if not described.digest_matches:
        check.find("manifest", "its own digest differs", file=manifest.NAME)
    index = check.open_index()
    if index is None:
        return check.report((), None, 0)
    extents = check.records(index)
    expected: Expected | None = None
    if shard_paths is not None:
        check.source_identity(shard_paths)
        expected = find_slices(shard_paths)
        check.completeness(index, expected)
        extents = check.with_slices(extents, expected)
    scans = [
        FileScan(pack / file.name, file.length, extents[number])
        for number, file in enumerate(index.files)
    ]
    check.scan(scans, threads, progress)
    check.file_digests(scans)
    compared = None if expected is None else sum(scan.compared_length for scan in scans)
    return check.report(index.families, compared, sum(scan.read_length for scan in scans))


class _Check:
    """One verification: collects findings."""

    def __init__(self, path: Path, described: manifest.Manifest) -> None:
        self.path = path
        self.manifest = described
        self.findings: list[Finding] = []

    def find(self, kind: str, message: str, **where: object) -> None:
        self.findings.append(Finding(kind, message, **where))  # type: ignore[arg-type]

    def report(self, families: Sequence[PackedFamily], compared: int | None, read: int) -> Report:
        def key(finding: Finding) -> tuple[int, int, str, int]:
            layer = -1 if finding.layer is None else finding.layer
            expert = -1 if finding.expert is None else finding.expert
            return layer, expert, finding.part or "", finding.offset or 0

        return Report(
            path=str(self.path),
            findings=tuple(sorted(self.findings, key=key)),
            layers=tuple(dict.fromkeys(family.layer for family in families)),
            blob_count=sum(family.expert_count for family in families),
            part_count=sum(family.expert_count * len(family.part_kinds) for family in families),
            read_length=read,
            compared_length=compared,
        )

    def open_index(self) -> Index | None:
        """Decode the index; what keeps it from being decoded is a finding."""
        try:
            index = Index(map_index(self.path), str(self.path / manifest.INDEX_NAME))
        except PackError as error:
            if error.place in ("format_version", "required_features", "kind of file"):
                raise
            self.find("index", str(error), file=manifest.INDEX_NAME)
            return None
        expected = self.manifest.index_file.digest
        for which, found in (
            ("stored", index.stored_digest),
            ("computed", index.computed_digest()),
        ):
            if found != expected:
                message = f"its {which} digest is {digest.to_text(found)}, "
                message += f"the manifest says {digest.to_text(expected)}"
                self.find("index", message, file=manifest.INDEX_NAME)
        if self.manifest.index_file.length != index.header.index_length:
            message = f"the manifest says it has {self.manifest.index_file.length} bytes"
            self.find("index", message, file=manifest.INDEX_NAME)
        listed = [(entry.name, entry.length) for entry in self.manifest.files]
        if listed != list(index.files):
            self.find("index", "it lists other files than the manifest", file=manifest.INDEX_NAME)
        return index

    def records(self, index: Index) -> dict[int, list[Extent]]:
        """Check all records against the rules; give the sound parts by file."""
        extents: dict[int, list[Extent]] = defaultdict(list)
        blobs: dict[int, list[tuple[int, int, PackedFamily, int]]] = defaultdict(list)
        for family in index.families:
            for expert in range(family.expert_count):
                self._blob(index, family, expert, blobs, extents)
        self._ranks(index)
        for number, file in enumerate(index.files):
            if file.length % index.header.blob_alignment:
                self.find("file", "its length is not aligned", file=file.name, offset=file.length)
            self._overlaps(file.name, blobs[number])
            extents[number].sort(key=lambda extent: extent.offset)
        return extents

    def _blob(
        self,
        index: Index,
        family: PackedFamily,
        expert: int,
        blobs: dict[int, list[tuple[int, int, PackedFamily, int]]],
        extents: dict[int, list[Extent]],
    ) -> None:
        where = {"layer": family.layer, "expert": expert}
        try:
            blob = BlobRecord(*index.blob(family.first_blob + expert))
        except PackError as error:
            self.find("record", str(error), **where)
            return
        blobs[blob.file].append((blob.offset, blob.offset + blob.length, family, expert))
        end = blob.offset
        first_part = family.first_part + expert * len(family.part_kinds)
        for number, kind in enumerate(family.part_kinds):
            try:
                part = PartRecord(*index.part(first_part + number, kind))
            except PackError as error:
                self.find("record", str(error), part=kind.name, **where)
                continue
            name = index.files[part.file].name
            problem = _misplaced(index, kind, part, blob, end)
            if problem:
                place = {"file": name, "offset": part.offset}
                self.find("record", problem, part=kind.name, **where, **place)
            end = part.offset + part.stored_length
            extent = Extent(part.offset, kind.length, part.digest, family.layer, expert, kind.name)
            extents[part.file].append(extent)

    def _overlaps(self, name: str, blobs: list[tuple[int, int, PackedFamily, int]]) -> None:
        blobs.sort(key=lambda blob: blob[:2])
        reached = 0
        for start, end, family, expert in blobs:
            if start < reached:
                where = {"layer": family.layer, "expert": expert}
                self.find("record", "the blob overlaps another", file=name, offset=start, **where)
            reached = max(reached, end)

    def _ranks(self, index: Index) -> None:
        """Check that ranks are a permutation, and that hotness falls along them."""
        measured = [f.hotness_measured for f in index.families for _ in range(f.expert_count)]
        before: tuple[bool, int] = (True, 1 << 64)
        for rank in range(index.blob_count):
            try:
                number = index.blob_at_rank(rank)
                blob = BlobRecord(*index.blob(number))
            except PackError as error:
                self.find("rank", str(error), file=manifest.INDEX_NAME)
                continue
            if blob.rank != rank:
                message = f"blob {number} stands at rank {rank}, its record says {blob.rank}"
                self.find("rank", message, file=manifest.INDEX_NAME)
            hotness = (measured[number], blob.hotness)
            if blob.hotness and not measured[number]:
                message = f"blob {number} has a hotness, its family was not measured"
                self.find("rank", message, file=manifest.INDEX_NAME)
            elif hotness > before:
                message = f"blob {number} at rank {rank} is hotter than the one before it"
                self.find("rank", message, file=manifest.INDEX_NAME)
            before = hotness

    def source_identity(self, shard_paths: Sequence[str]) -> None:
        """Compare the shards' lengths and headers with what the pack was made from."""
        shards = self.manifest.source.get("shards")
        if not isinstance(shards, list) or len(shards) != len(shard_paths):
            count = len(shards) if isinstance(shards, list) else "unknown"
            message = f"the pack was made from {count} shards, the source has {len(shard_paths)}"
            self.find("source", message)
            return
        for described, path in zip(shards, shard_paths, strict=True):
            name = os.path.basename(path)
            if not isinstance(described, dict):
                self.find("source", "the manifest does not describe the shard", file=name)
                continue
            length, header = _shard_identity(path, described.get("header_length"))
            if length != described.get("length"):
                message = f"is {length} bytes long, was {short(described.get('length'))}"
                self.find("source", message, file=name)
            if header != described.get("header_sha256"):
                message = "its header is not that of the shard that was packed"
                self.find("source", message, file=name)

    def completeness(self, index: Index, expected: Expected) -> None:
        """Find what the source has and the pack has not, and the other way round."""
        layers = self.manifest.layers
        held = {(f.layer, kind.name): (f, kind) for f in index.families for kind in f.part_kinds}
        for (layer, part), slices in expected.items():
            if layers is not None and layer not in layers:
                continue
            if (layer, part) not in held:
                self.find("missing", "the source has this part", layer=layer, part=part)
                continue
            family, kind = held[layer, part]
            found = (family.expert_count, kind.type_id, kind.shape, kind.length)
            wanted = (len(slices.starts), slices.type_id, slices.shape, slices.length)
            if found != wanted:
                message = f"experts, type, shape and length are {found}, the source has {wanted}"
                self.find("shape", message, layer=layer, part=part)
        for layer, part in held:
            if (layer, part) not in expected:
                self.find("surplus", "the source has no such part", layer=layer, part=part)
        for layer in sorted(set(layers or ()) - {layer for layer, _ in held}):
            self.find("missing", "the manifest lists this layer", layer=layer)

    def with_slices(
        self, extents: dict[int, list[Extent]], expected: Expected
    ) -> dict[int, list[Extent]]:
        """Say for each part where its slice lies, so that the scan compares the two."""
        result: dict[int, list[Extent]] = defaultdict(list)
        for number, held in extents.items():
            for extent in held:
                slices = expected.get((extent.layer, extent.part))
                if slices is not None and extent.expert < len(slices.starts):
                    place = (slices.paths[extent.expert], slices.starts[extent.expert])
                    extent = extent._replace(slice=place, slice_length=slices.length)
                result[number].append(extent)
        return result

    def scan(
        self, scans: list[FileScan], threads: int, progress: Callable[[int], None] | None
    ) -> None:
        """Read all files, several at a time."""
        lock = threading.Lock()

        def advanced(length: int) -> None:
            if progress is not None:
                with lock:
                    progress(length)

        stop = threading.Event()
        with ThreadPoolExecutor(max_workers=threads) as executor:
            try:
                for findings in executor.map(lambda scan: scan.run(advanced, stop), scans):
                    self.findings += findings
            except BaseException:
                stop.set()
                executor.shutdown(cancel_futures=True)
                raise

    def file_digests(self, scans: list[FileScan]) -> None:
        """Compare what was read with the digests of whole files."""
        entries = {entry.name: entry for entry in self.manifest.files}
        for scan in scans:
            entry = entries.get(scan.path.name)
            if entry is not None and scan.digest is not None and scan.digest != entry.digest:
                message = f"its digest is {digest.to_text(scan.digest)}, "
                message += f"the manifest says {digest.to_text(entry.digest)}"
                self.find("file", message, file=entry.name)


def _misplaced(
    index: Index, kind: PartKind, part: PartRecord, blob: BlobRecord, end: int
) -> str | None:
    """Say what is wrong with where a part lies in its blob; `end` is the end of the part before."""
    last = blob.offset + blob.length
    if part.file != blob.file or not blob.offset <= part.offset <= last - part.stored_length:
        return f"lies outside its blob, which is bytes {blob.offset} to {last} of file {blob.file}"
    if part.offset < end:
        return f"overlaps the part before it, which ends at byte {end}"
    if kind.name.endswith(".weight") and part.offset % index.header.part_alignment:
        return f"is not aligned to {index.header.part_alignment}"
    return None


def _shard_identity(path: str, header_length: object) -> tuple[int, str]:
    """Give a shard's length and the SHA-256 of its first `header_length` bytes."""
    try:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            sha256 = hashlib.sha256()
            left = min(header_length, length) if isinstance(header_length, int) else 0
            for piece in _pieces(left):
                sha256.update(file.read(piece))
    except OSError as error:
        raise SourceError(f"cannot read: {error.strerror}", path=path) from None
    return length, sha256.hexdigest()


def _pieces(length: int) -> Iterator[int]:
    while length > 0:
        yield min(length, 1 << 20)
        length -= 1 << 20
