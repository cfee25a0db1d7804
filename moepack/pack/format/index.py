"""The index: where every part of every expert lies (FORMAT.md, "The index").

This is the decoder that the reader and the verifier share. `Index` checks header, directory and
tables of files, families and part kinds when it is made; blobs and parts, of which there may be
millions, are checked one by one when they are looked up, as dense tensors are.
It opens no file: it is given the bytes.
"""

import struct
from mmap import mmap
from typing import NoReturn

from moepack.common import digest
from moepack.common.errors import PackError
from moepack.common.sizes import ranges_text
from moepack.pack.format import records, sections
from moepack.pack.format.dense import DensePart
from moepack.pack.format.manifest import Manifest
from moepack.pack.format.tables import PackedFamily, PartKind, TableDecoder


class Index(DensePart):
    """A decoded index.bin.

    `data` is the whole index, mapped or read; it must outlive the Index. `path` is for messages.
    Raises PackError when a rule of the format is broken.
    """

    def __init__(self, data: bytes | mmap, path: str) -> None:
        super().__init__(data, path)
        self.header = self._read_header()
        self.directory = sections.decode(data, self.header, path)
        self.blob_count = self.directory["blobs"].record_count
        self.part_count = self.directory["parts"].record_count
        ranks = self.directory["ranks"].record_count
        if ranks != self.blob_count:
            self._fail("ranks", "not one for each blob", f"{self.blob_count:,}", f"{ranks:,}")
        tables = TableDecoder(data, self.directory, path)
        self.files = tables.files()
        self.families = tables.families()
        self.tensor_count = self.directory["tensors"].record_count
        self.shard_range_count = self.directory["shard_bytes"].record_count
        self.trailer_digest: int = records.TRAILER.unpack_from(data, len(data) - 8)[0]
        self._blob = _padded(records.BLOB, self.directory["blobs"].record_length)
        self._part = _padded(records.PART, self.directory["parts"].record_length)
        self._blobs_at = self.directory["blobs"].offset
        self._parts_at = self.directory["parts"].offset
        self._alignment = self.header.blob_alignment
        # A blob lies in a data file: in a shard there is no room for one.
        self._blob_ends = tuple(0 if file.is_shard else file.length for file in self.files)

    @property
    def is_whole(self) -> bool:
        """Whether the dense part is there as well, and the bytes of shards that are no tensor's."""
        return {"tensors", "shard_bytes"} <= self.directory.sections.keys()

    @property
    def data(self) -> bytes:
        """A copy of all its bytes."""
        data: bytes = self._data[:]
        return data

    def computed_digest(self) -> int:
        """Compute the digest of everything before the trailer."""
        with memoryview(self._data) as view:
            return digest.xxh3(view[: -records.TRAILER.size])

    def check_manifest(self, described: Manifest) -> None:
        """Check that a manifest is of this index, and that no bit of the index has changed."""
        entry = described.index_entry
        for name, actual in (("stored", self.trailer_digest), ("computed", self.computed_digest())):
            if actual != entry.digest:
                raise PackError(
                    f"the index is damaged or of another pack: its {name} digest differs",
                    path=self.path,
                    place="trailer",
                    expected=digest.to_text(entry.digest),
                    found=digest.to_text(actual),
                    hint="run `moepack verify` on the pack",
                )
        length = self.header.index_length
        if entry.length != length:
            problem = "the index is not as long as the manifest says"
            expected = f"{entry.length:,} bytes"
            raise PackError(problem, path=self.path, expected=expected, found=f"{length:,}")
        files = [(file.name, file.length) for file in self.files]
        if [(file.name, file.length) for file in described.files] != files:
            self._fail("files", "index and manifest list other files")
        if described.is_whole != (self.is_whole and described.layers is None):
            problem = "index and manifest differ on whether the pack is whole"
            self._fail("whole", problem, described.is_whole)
        layers = sorted({family.layer for family in self.families})
        if described.layers is not None and described.layers != layers:
            expected = ranges_text(described.layers)
            problem = "index and manifest list other layers"
            self._fail("layers", problem, expected, ranges_text(layers))

    def content_digest(self) -> int:
        """Compute the digest of the tables of files and parts.

        A new ranking leaves it as it is, since blobs stay in their places.
        """
        content = digest.stream()
        with memoryview(self._data) as view:
            for section in (self.directory["files"], self.directory["parts"]):
                content.update(view[section.offset : section.end])
        return content.intdigest()

    def blob(self, number: int) -> tuple[int, int, int, int, int]:
        """Return the fields of a BlobRecord, checked against the rules of the format.

        With a length of 0 the expert has no blob: its parts lie apart, in shards. A plain tuple:
        engines look up thousands a second, and naming the fields is half the time.
        """
        record = self._blob.unpack_from(self._data, self._blobs_at + number * self._blob.size)
        start, length, _, rank, file = record
        if rank >= self.blob_count:
            self._fail(f"blob {number}", "no such rank", f"< {self.blob_count:,}", f"{rank:,}")
        if not length:
            if start or file:
                extent = f"byte {start:,} of file {file}"
                self._fail(f"blob {number}", "no length, yet a place", "neither, or both", extent)
            return record
        if file >= len(self.files):
            self._fail(f"blob {number}", "no such file", f"< {len(self.files)}", file)
        if start % self._alignment:
            self._fail_unaligned(f"blob {number}", "offset", self._alignment, start)
        if length % self._alignment:
            self._fail_unaligned(f"blob {number}", "length", self._alignment, length)
        if start + length > self._blob_ends[file]:
            if self.files[file].is_shard:
                self._fail(f"blob {number}", "a blob in a shard", "a data file", f"file {file}")
            self._fail_past_end(f"blob {number}", self.files[file], start, length)
        return record

    def part(self, number: int, kind: PartKind) -> tuple[int, int, int, int, int]:
        """Return the fields of a PartRecord of `kind`, checked against the rules of the format."""
        record = self._part.unpack_from(self._data, self._parts_at + number * self._part.size)
        self._check_part(number, kind, record)
        return record

    def parts(
        self, first: int, kinds: tuple[PartKind, ...]
    ) -> list[tuple[int, int, int, int, int]]:
        """Return the checked fields of the PartRecords from `first` on, one for each of `kinds`."""
        size = self._part.size
        offset = self._parts_at + first * size
        table = self._data[offset : offset + len(kinds) * size]
        parts = list(self._part.iter_unpack(table))
        for number, kind in enumerate(kinds):
            self._check_part(first + number, kind, parts[number])
        return parts

    def _check_part(
        self, number: int, kind: PartKind, record: tuple[int, int, int, int, int]
    ) -> None:
        start, stored_length, _, file, codec = record
        if file >= len(self.files):
            self._fail_part(number, kind, "no such file", f"< {len(self.files)}", file)
        if codec != records.CODEC_RAW:
            self._fail_part(number, kind, "unknown codec", records.CODEC_RAW, codec)
        if stored_length != kind.length:
            problem, expected = "stored_length is not the part's length", f"{kind.length:,} bytes"
            self._fail_part(number, kind, problem, expected, f"{stored_length:,}")
        if start + stored_length > self.files[file].length:
            place = _part_place(number, kind)
            self._fail_past_end(place, self.files[file], start, stored_length)

    def _fail_part(
        self, number: int, kind: PartKind, problem: str, expected: object, actual: object
    ) -> NoReturn:
        self._fail(_part_place(number, kind), problem, expected, actual)

    def strong_digest(self, number: int) -> bytes | None:
        """Return a SHA-256; None if the index has none.

        `number` counts parts, then tensors, then shard bytes.
        """
        section = self.directory["strong_digests"]
        if not section.record_count:
            return None
        strong: bytes = records.STRONG_DIGEST.unpack_from(self._data, section.at(number))[0]
        return strong

    def blob_at_rank(self, rank: int) -> int:
        """Return the number of the blob that has `rank`; 0 is the hottest."""
        at = self.directory["ranks"].at(rank)
        number: int = records.RANK.unpack_from(self._data, at)[0]
        if number >= self.blob_count:
            self._fail(f"rank {rank}", "no such blob", f"< {self.blob_count:,}", number)
        return number

    def origin(self, family: PackedFamily, kind: PartKind, expert: int) -> tuple[int, int]:
        """Return where an expert's slice lay in the source: shard, and offset from its start."""
        shard, offset, stride, first_slice = kind.origin
        if first_slice is None:
            return shard, offset + expert * stride
        number = first_slice + expert
        slices = self.directory["slices"]
        if number >= slices.record_count:
            place = f"layer {family.layer} expert {expert} {kind.name}"
            self._fail(place, "no such record in slices", f"< {slices.record_count:,}", number)
        record = records.SliceRecord._make(records.SLICE.unpack_from(self._data, slices.at(number)))
        self._check_shard(f"slices {number}", record.shard, record.shard_offset)
        return record.shard, record.shard_offset

    def _read_header(self) -> records.Header:
        data = self._data
        smallest = records.HEADER.size + records.TRAILER.size
        if len(data) < smallest:
            self._fail("header", "the index is cut short", f">= {smallest} bytes", len(data))
        header = records.Header._make(records.HEADER.unpack_from(data, 0))
        if header.magic != records.MAGIC:
            self._fail("magic", "not a moepack index", records.MAGIC, header.magic)
        if header.format_version != records.FORMAT_VERSION:
            raise records.unknown_version(header.format_version, self.path)
        if header.index_length > records.MAX_INDEX_LENGTH:
            most = f"<= {records.MAX_INDEX_LENGTH:,} bytes"
            self._fail("index_length", "out of bounds", most, f"{header.index_length:,}")
        if header.index_length != len(data):
            expected = f"{header.index_length:,} bytes"
            self._fail("index_length", "wrong length", expected, f"{len(data):,}")
        self._check_record_lengths(header)
        self._check_alignments(header)
        return header

    def _check_record_lengths(self, header: records.Header) -> None:
        count = header.section_count
        if not 1 <= count <= records.MAX_SECTIONS:
            expected = f"1 to {records.MAX_SECTIONS}"
            self._fail("section_count", "out of bounds", expected, f"{count:,}")
        for name, least in (
            ("header_length", records.HEADER.size),
            ("section_record_length", records.SECTION.size),
        ):
            length = getattr(header, name)
            if not least <= length <= records.MAX_RECORD_LENGTH or length % 8:
                expected = f"{least} to {records.MAX_RECORD_LENGTH:,}, a multiple of 8"
                self._fail(name, "wrong length", expected, f"{length:,}")
        end = header.header_length + count * header.section_record_length
        if end + records.TRAILER.size > header.index_length:
            most = f"<= {header.index_length:,} bytes"
            self._fail("directory", "longer than the index", most, f"{end:,}")
        if end > records.MAX_DIRECTORY_END:
            most = f"<= byte {records.MAX_DIRECTORY_END:,}"
            self._fail("directory", "ends too far in", most, f"byte {end:,}")

    def _check_alignments(self, header: records.Header) -> None:
        for name in ("blob_alignment", "part_alignment", "tensor_alignment"):
            alignment = getattr(header, name)
            if alignment.bit_count() != 1 or alignment > records.MAX_ALIGNMENT:
                expected = f"a power of two up to {records.MAX_ALIGNMENT:,}"
                self._fail(name, "not an alignment", expected, f"{alignment:,}")
        if header.part_alignment > header.blob_alignment:
            most = f"<= {header.blob_alignment:,}"
            self._fail("part_alignment", "above the blobs'", most, header.part_alignment)

    def _fail_unaligned(self, place: str, field: str, alignment: int, value: int) -> NoReturn:
        expected = f"a multiple of {alignment:,}"
        self._fail(place, f"{field} not aligned", expected, f"{value:,}")


def _part_place(number: int, kind: PartKind) -> str:
    return f"part {number} ({kind.name})"


def _padded(record: struct.Struct, length: int) -> struct.Struct:
    """Return the struct of a record that is followed by fields of later versions."""
    return struct.Struct(f"{record.format}{length - record.size}x")
