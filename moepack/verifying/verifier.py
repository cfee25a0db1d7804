"""Verify a pack: its structure, its padding, every digest, and every byte against the source.

Verification shares the index decoder with the reader, and with the packer only how the files of a
model are named: where the slices lie in them it learns from `witness`. It gives back all findings
and stops at none, as long as the manifest and the tables of the index can be read at all.
"""

import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack import digest
from moepack.errors import MachineError, PackError, SourceError, is_shortage
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.records import BlobRecord, PartRecord
from moepack.format.tables import PackedFamily, PartKind
from moepack.reading.directory import map_index, read_manifest
from moepack.source.shards import PathOrPaths, find_shards
from moepack.storage.regular_file import open_regular
from moepack.storage.thread_pool import ThreadPool
from moepack.verifying.file_scan import FileScan, PartExtent, SliceExtent
from moepack.verifying.report import Finding, Report
from moepack.verifying.witness import PartKey, PartSlices, find_slices, in_order

DEFAULT_THREADS = 4

Progress = Callable[[int, int], None]
"""Called with the bytes read since its last call, and the bytes that are to be read in all."""


class _BlobExtent(NamedTuple):
    """A blob as the index places it, from `start` to `end` in its file."""

    start: int
    end: int
    family: PackedFamily
    expert: int


def verify(
    path: str | os.PathLike[str],
    source: PathOrPaths | None = None,
    *,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> Report:
    """Verify the pack at `path`, against the source that it was made from where one is given.

    `source` is any one shard, a folder, or all shards. `progress` is called from one thread at a
    time. Raises PackError where there is no pack or one of an unknown version, SourceError where a
    shard cannot be read, MachineError where the machine has not enough memory, threads or open
    files; everything else that is wrong is a finding.
    """
    try:
        shard_paths = None if source is None else _shards_in_order(source)
        return _verify(Path(path), shard_paths, threads, progress)
    except MemoryError:
        raise MachineError("not enough memory", path=path, hint="use fewer --threads") from None


def _verify(
    pack: Path, shard_paths: Sequence[str] | None, threads: int, progress: Progress | None
) -> Report:
    name = pack / manifest.NAME
    described = manifest.decode(read_manifest(pack), str(name))
    check = _Verification(pack, described)
    if not described.digest_matches:
        check.find("manifest", "its own digest differs", file=manifest.NAME)
    index = check.open_index()
    if index is None:
        return check.report((), None, 0)
    extents = check.records(index)
    expected: dict[PartKey, PartSlices] | None = None
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
    compared = None if expected is None else sum(scan.compared_length for scan in scans)
    return check.report(index.families, compared, sum(scan.read_length for scan in scans))


def _shards_in_order(source: PathOrPaths) -> list[str]:
    paths = [str(path) for path in find_shards(source)]
    is_listed = not isinstance(source, str | os.PathLike) and len(source) > 1
    return in_order(paths) if is_listed else paths


class _Verification:
    """One verification: it collects findings."""

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
            passed=not self.findings,
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
        expected = self.manifest.index_entry.digest
        for which, actual in (
            ("stored", index.stored_digest),
            ("computed", index.computed_digest()),
        ):
            if actual != expected:
                message = f"its {which} digest is {digest.to_text(actual)}, "
                message += f"the manifest says {digest.to_text(expected)}"
                self.find("index", message, file=manifest.INDEX_NAME)
        if self.manifest.index_entry.length != index.header.index_length:
            message = f"the manifest says it has {self.manifest.index_entry.length} bytes"
            self.find("index", message, file=manifest.INDEX_NAME)
        listed = [(entry.name, entry.length) for entry in self.manifest.files]
        if listed != [(file.name, file.length) for file in index.files]:
            self.find("index", "it lists other files than the manifest", file=manifest.INDEX_NAME)
        return index

    def records(self, index: Index) -> dict[int, list[PartExtent]]:
        """Check all records against the rules; return the sound parts by file."""
        extents: dict[int, list[PartExtent]] = defaultdict(list)
        blobs: dict[int, list[_BlobExtent]] = defaultdict(list)
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
        blobs: dict[int, list[_BlobExtent]],
        extents: dict[int, list[PartExtent]],
    ) -> None:
        where = {"layer": family.layer, "expert": expert}
        try:
            blob = BlobRecord(*index.blob(family.first_blob + expert))
        except PackError as error:
            self.find("record", str(error), **where)
            return
        extent = _BlobExtent(blob.offset, blob.offset + blob.length, family, expert)
        blobs[blob.file].append(extent)
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
            extents[part.file].append(
                PartExtent(part.offset, kind.length, part.digest, family.layer, expert, kind.name)
            )

    def _overlaps(self, name: str, blobs: list[_BlobExtent]) -> None:
        blobs.sort(key=lambda blob: (blob.start, blob.end))
        reached = 0
        for blob in blobs:
            if blob.start < reached:
                where = {"layer": blob.family.layer, "expert": blob.expert, "file": name}
                self.find("record", "the blob overlaps another", offset=blob.start, **where)
            reached = max(reached, blob.end)

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
        shards = self.manifest.source.shards
        if len(shards) != len(shard_paths):
            message = (
                f"the pack was made from {len(shards)} shards, the source has {len(shard_paths)}"
            )
            self.find("source", message)
            return
        for described, path in zip(shards, shard_paths, strict=True):
            name = os.path.basename(path)
            length, header = _shard_identity(path, described.header_length)
            if length != described.length:
                message = f"is {length:,} bytes long, was {described.length:,}"
                self.find("source", message, file=name)
            if header != described.header_sha256:
                message = "its header is not that of the shard that was packed"
                self.find("source", message, file=name)

    def completeness(self, index: Index, expected: dict[PartKey, PartSlices]) -> None:
        """Find what the source has and the pack has not, and the other way round."""
        layers = self.manifest.layers
        held = {
            PartKey(family.layer, kind.name): (family, kind)
            for family in index.families
            for kind in family.part_kinds
        }
        for key, slices in expected.items():
            if layers is not None and key.layer not in layers:
                continue
            if key not in held:
                self.find("missing", "the source has this part", **key._asdict())
                continue
            family, kind = held[key]
            ours = (family.expert_count, kind.type_id, kind.shape, kind.length)
            theirs = (len(slices.starts), slices.type_id, slices.shape, slices.length)
            if ours != theirs:
                message = f"experts, type, shape and length are {ours}, the source has {theirs}"
                self.find("shape", message, **key._asdict())
        for key in held:
            if key not in expected:
                self.find("surplus", "the source has no such part", **key._asdict())
        for layer in sorted(set(layers or ()) - {key.layer for key in held}):
            self.find("missing", "the manifest lists this layer", layer=layer)

    def with_slices(
        self, extents: dict[int, list[PartExtent]], expected: dict[PartKey, PartSlices]
    ) -> dict[int, list[PartExtent]]:
        """Say for each part where its slice lies, so that the scan compares the two."""
        result: dict[int, list[PartExtent]] = defaultdict(list)
        for number, in_file in extents.items():
            for extent in in_file:
                slices = expected.get(PartKey(extent.layer, extent.part))
                if slices is not None and extent.expert < len(slices.starts):
                    path, start = slices.paths[extent.expert], slices.starts[extent.expert]
                    extent = extent._replace(slice=SliceExtent(path, start, slices.length))
                result[number].append(extent)
        return result

    def scan(self, scans: list[FileScan], threads: int, progress: Progress | None) -> None:
        """Read all files, several at a time."""
        lock = threading.Lock()
        total = sum(scan.length for scan in scans)

        def advanced(length: int) -> None:
            if progress is not None:
                with lock:
                    progress(length, total)

        stop = threading.Event()
        with ThreadPool(max_workers=threads) as executor:
            try:
                for findings in executor.map(lambda scan: scan.run(advanced, stop), scans):
                    self.findings += findings
            except BaseException:
                stop.set()
                executor.shutdown(cancel_futures=True)
                raise


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
    """Return a shard's length and the SHA-256 of its first `header_length` bytes."""
    try:
        with open(open_regular(path), "rb") as file:
            length = os.fstat(file.fileno()).st_size
            sha256 = hashlib.sha256()
            left = min(header_length, length) if isinstance(header_length, int) else 0
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                sha256.update(piece)
                left -= len(piece)
    except OSError as error:
        kind = MachineError if is_shortage(error) else SourceError
        raise kind(f"cannot read: {error.strerror}", path=path) from None
    return length, sha256.hexdigest()
