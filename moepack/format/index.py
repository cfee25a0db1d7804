"""The index: where every part of every expert lies (FORMAT.md, "The index").

This is the decoder that the reader and the verifier share. `Index` checks header, directory and
tables of files, families and part kinds when it is made; blobs and parts, of which there may be
millions, are checked one by one when they are looked up, and dense tensors when they are asked for.
It opens no file: it is given the bytes.
"""

import struct
from collections.abc import Iterator
from mmap import mmap

from moepack import digest
from moepack.errors import PackError
from moepack.format import records, sections, tables
from moepack.format.dense import DenseDecoder, DenseTensor, ShardBytes
from moepack.format.tables import PackedFamily, PartKind


class Index:
    """A decoded index.bin.

    `data` is the whole index, mapped or read; it must outlive the Index. `path` is for messages.
    Raises PackError when a rule of the format is broken.
    """

    def __init__(self, data: bytes | mmap, path: str) -> None:
        self.path = path
        self._data = data
        self.header = self._read_header()
        self.directory = sections.decode(data, self.header, path)
        self.blob_count = self.directory["blobs"].record_count
        self.part_count = self.directory["parts"].record_count
        if self.directory["ranks"].record_count != self.blob_count:
            found = f"{self.directory['ranks'].record_count:,}"
            raise self._error("ranks", "not one for each blob", f"{self.blob_count:,}", found)
        self.files = tables.read_files(data, self.directory, path)
        self.families = tables.read_families(data, self.directory, path)
        self.codecs = tables.read_codecs(data, self.directory, path)
        self.tensor_count = self.directory["tensors"].record_count
        self.shard_range_count = self.directory["shard_bytes"].record_count
        self.trailer_digest: int = records.TRAILER.unpack_from(data, len(data) - 8)[0]
        self._blob = _padded(records.BLOB, self.directory["blobs"].record_length)
        self._part = _padded(records.PART, self.directory["parts"].record_length)
        self._blobs_at = self.directory["blobs"].offset
        self._parts_at = self.directory["parts"].offset
        self._alignment = self.header.blob_alignment
        # A blob lies in a data file: in a shard there is no room for one.
        self._blob_ends = tuple(file.length if file.has_blobs else 0 for file in self.files)

    @property
    def is_whole(self) -> bool:
        """Whether the dense part is there as well, and the bytes of shards that are no tensor's."""
        return {"tensors", "shard_bytes"} <= self.directory.sections.keys()

    @property
    def data(self) -> bytes:
        """A copy of all its bytes."""
        return self._data[:]

    def computed_digest(self) -> int:
        """Compute the digest of everything before the trailer."""
        with memoryview(self._data) as view:
            return digest.of(view[: -records.TRAILER.size])

    def content_digest(self) -> int:
        """Compute the digest of which files there are, where parts lie in them and what they hold.

        A new ranking leaves it as it is: blobs stay where they are.
        """
        content = digest.stream()
        with memoryview(self._data) as view:
            for section in (self.directory["files"], self.directory["parts"]):
                content.update(view[section.offset : section.end])
        return content.intdigest()

    def blob(self, number: int) -> tuple[int, int, int, int, int]:
        """Return the fields of a BlobRecord, checked against the rules of the format.

        A length of 0 says that the blob's parts lie apart, in shards. A plain tuple: engines look
        up thousands a second, and naming the fields is half the time.
        """
        record = self._blob.unpack_from(self._data, self._blobs_at + number * self._blob.size)
        start, length, _, rank, file = record
        if (
            file >= len(self.files)
            or start + length > self._blob_ends[file]
            or start % self._alignment
            or length % self._alignment
            or rank >= self.blob_count
            or not length
        ) and not (length == start == file == 0 and rank < self.blob_count):
            raise self._bad_blob(number, records.BlobRecord(*record))
        return record

    def part(self, number: int, kind: PartKind) -> tuple[int, int, int, int, int]:
        """Return the fields of a PartRecord of `kind`, checked against the rules of the format."""
        record = self._part.unpack_from(self._data, self._parts_at + number * self._part.size)
        self._check_part(number, kind, record)
        return record

    def parts(
        self, first: int, kinds: tuple[PartKind, ...]
    ) -> list[tuple[int, int, int, int, int]]:
        """Return what `part` does, of the parts from `first` on, which are of `kinds` in order."""
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
        if (
            file >= len(self.files)
            or codec > len(self.codecs)
            or (not 0 < stored_length < kind.length if codec else stored_length != kind.length)
            or start + stored_length > self.files[file].length
            or (codec and self.files[file].is_shard)
        ):
            raise self._bad_part(number, records.PartRecord(*record), kind)

    def stored_length(self) -> int:
        """Return the bytes that all parts take where they lie, without padding."""
        if not self.codecs:
            return sum(
                family.expert_count * sum(kind.length for kind in family.part_kinds)
                for family in self.families
            )
        return sum(
            length
            for family in self.families
            for expert in range(family.expert_count)
            for _, length, *_ in self.parts(
                family.first_part + expert * len(family.part_kinds), family.part_kinds
            )
        )

    def stored_digest(self, number: int) -> int | None:
        """Return the digest of the stored bytes of a part; None where the index has none."""
        section = self.directory["stored_digests"]
        if not section.record_count:
            return None
        stored: int = records.STORED_DIGEST.unpack_from(self._data, section.at(number))[0]
        return stored

    def strong_digest(self, number: int) -> bytes | None:
        """Return a SHA-256; None where the index has none.

        `number` counts parts, then tensors, then shard bytes.
        """
        section = self.directory["strong_digests"]
        if not section.record_count:
            return None
        strong: bytes = records.STRONG_DIGEST.unpack_from(self._data, section.at(number))[0]
        return strong

    def second_place(self, number: int, kind: PartKind) -> tuple[int, int] | None:
        """Return file and offset of the second place of a part; None where it has none."""
        section = self.directory["second_places"]
        if not section.record_count:
            return None
        record = records.SecondPlaceRecord.unpack(self._data, section.at(number))
        if not record.file:
            return None
        place, file = f"second place {number}", record.file - 1
        if file >= len(self.files) or not self.files[file].is_second:
            raise self._error(place, "not in a file of second places", found=f"file {file}")
        if record.offset % self.header.part_alignment:
            expected = f"a multiple of {self.header.part_alignment:,}"
            raise self._error(place, "offset not aligned", expected, f"{record.offset:,}")
        length = self.part(number, kind)[1]
        if record.offset + length > self.files[file].length:
            raise self._past_the_end(place, file, record.offset, length)
        return file, record.offset

    def blob_at_rank(self, rank: int) -> int:
        """Return the number of the blob that has `rank`; 0 is the hottest."""
        at = self.directory["ranks"].at(rank)
        number: int = records.RANK.unpack_from(self._data, at)[0]
        if number >= self.blob_count:
            raise self._error(f"rank {rank}", "no such blob", f"< {self.blob_count:,}", number)
        return number

    def tensors(self) -> Iterator[DenseTensor]:
        """Yield the dense tensors; none where the pack holds experts alone."""
        return self._dense_decoder().tensors()

    def shard_bytes(self) -> Iterator[ShardBytes]:
        """Yield the ranges of shards that belong to no tensor."""
        return self._dense_decoder().shard_bytes()

    def tensor(self, number: int) -> DenseTensor:
        """Return dense tensor `number`, checked against the rules of the format."""
        return self._dense_decoder().tensor(number)

    def shard_range(self, number: int) -> ShardBytes:
        """Return range `number` of those that belong to no tensor, checked as a tensor is."""
        return self._dense_decoder().range_of_shard(number)

    def _dense_decoder(self) -> DenseDecoder:
        alignment = self.header.tensor_alignment
        return DenseDecoder(self._data, self.directory, self.files, alignment, self.path)

    def origin(self, family: PackedFamily, kind: PartKind, expert: int) -> tuple[int, int]:
        """Return where an expert's slice lay in the source: shard, and offset from its start."""
        shard, offset, stride, first_slice = kind.origin
        if first_slice is None:
            return shard, offset + expert * stride
        number = first_slice + expert
        held = self.directory["slices"].record_count
        if number >= held:
            place = f"layer {family.layer} expert {expert} {kind.name}"
            raise self._error(place, "no such record in slices", f"< {held:,}", number)
        record = records.SliceRecord.unpack(self._data, self.directory["slices"].at(number))
        if record.shard >= records.MAX_SHARDS:
            most = f"< {records.MAX_SHARDS:,}"
            raise self._error(f"slices {number}", "shard out of bounds", most, record.shard)
        if record.shard_offset > records.MAX_LENGTH:
            most, found = f"<= {records.MAX_LENGTH:,}", f"{record.shard_offset:,}"
            raise self._error(f"slices {number}", "shard_offset out of bounds", most, found)
        return record.shard, record.shard_offset

    def _read_header(self) -> records.Header:
        data = self._data
        smallest = records.Header.LAYOUT.size + records.TRAILER.size
        if len(data) < smallest:
            raise self._error("header", "the index is cut short", f">= {smallest} bytes", len(data))
        header = records.Header.unpack(data, 0)
        if header.magic != records.MAGIC:
            raise self._error("magic", "not a moepack index", records.MAGIC, header.magic)
        if header.format_version != records.FORMAT_VERSION:
            raise PackError(
                "unknown format version",
                path=self.path,
                place="format_version",
                expected=records.FORMAT_VERSION,
                found=header.format_version,
                hint="read it with a newer moepack",
            )
        if header.index_length > records.MAX_INDEX_LENGTH:
            most = f"<= {records.MAX_INDEX_LENGTH:,} bytes"
            raise self._error("index_length", "out of bounds", most, f"{header.index_length:,}")
        if header.index_length != len(data):
            expected = f"{header.index_length:,} bytes"
            raise self._error("index_length", "wrong length", expected, f"{len(data):,}")
        self._check_record_lengths(header)
        self._check_alignments(header)
        return header

    def _check_record_lengths(self, header: records.Header) -> None:
        count = header.section_count
        if not 1 <= count <= records.MAX_SECTIONS:
            expected = f"1 to {records.MAX_SECTIONS}"
            raise self._error("section_count", "out of bounds", expected, f"{count:,}")
        for name, kind in (
            ("header_length", records.Header),
            ("section_record_length", records.SectionRecord),
        ):
            length, known = getattr(header, name), kind.LAYOUT.size
            if not known <= length <= records.MAX_RECORD_LENGTH or length % 8:
                expected = f"{known} to {records.MAX_RECORD_LENGTH:,}, a multiple of 8"
                raise self._error(name, "wrong length", expected, f"{length:,}")
        end = header.header_length + count * header.section_record_length
        if end + records.TRAILER.size > header.index_length:
            most = f"<= {header.index_length:,} bytes"
            raise self._error("directory", "longer than the index", most, f"{end:,}")
        if end > records.MAX_DIRECTORY_END:
            most = f"<= byte {records.MAX_DIRECTORY_END:,}"
            raise self._error("directory", "ends too far in", most, f"byte {end:,}")

    def _check_alignments(self, header: records.Header) -> None:
        for name in ("blob_alignment", "part_alignment", "tensor_alignment"):
            alignment = getattr(header, name)
            if alignment.bit_count() != 1 or alignment > records.MAX_ALIGNMENT:
                expected = f"a power of two up to {records.MAX_ALIGNMENT:,}"
                raise self._error(name, "not an alignment", expected, f"{alignment:,}")
        if header.part_alignment > header.blob_alignment:
            most = f"<= {header.blob_alignment:,}"
            raise self._error("part_alignment", "above the blobs'", most, header.part_alignment)

    def _bad_blob(self, number: int, record: records.BlobRecord) -> PackError:
        """Say which rule the record of a blob breaks."""
        place = f"blob {number}"
        if record.rank >= self.blob_count:
            return self._error(place, "no such rank", f"< {self.blob_count:,}", f"{record.rank:,}")
        if not record.length:
            found = f"byte {record.offset:,} of file {record.file}"
            return self._error(place, "no length, yet a place", "neither, or both", found)
        if record.file >= len(self.files):
            return self._error(place, "no such file", f"< {len(self.files)}", record.file)
        for field in ("offset", "length"):
            value = getattr(record, field)
            if value % self._alignment:
                expected = f"a multiple of {self._alignment:,}"
                return self._error(place, f"{field} not aligned", expected, f"{value:,}")
        if not self.files[record.file].has_blobs:
            what = "a shard" if self.files[record.file].is_shard else "a file of second places"
            problem = f"a blob in {what}"
            return self._error(place, problem, "a data file", f"file {record.file}")
        return self._past_the_end(place, record.file, record.offset, record.length)

    def _bad_part(self, number: int, record: records.PartRecord, kind: PartKind) -> PackError:
        """Say which rule the record of a part breaks."""
        place = f"part {number} ({kind.name})"
        if record.file >= len(self.files):
            return self._error(place, "no such file", f"< {len(self.files)}", record.file)
        if record.codec > len(self.codecs):
            return self._error(place, "unknown codec", f"<= {len(self.codecs)}", record.codec)
        if record.codec and self.files[record.file].is_shard:
            found = f"codec {record.codec}"
            return self._error(place, "a codec in a shard", records.CODEC_RAW, found)
        if record.codec and not 0 < record.stored_length < kind.length:
            expected, found = f"1 to {kind.length - 1:,} bytes", f"{record.stored_length:,}"
            return self._error(place, "stored_length does not shorten the part", expected, found)
        if not record.codec and record.stored_length != kind.length:
            expected, found = f"{kind.length:,} bytes", f"{record.stored_length:,}"
            return self._error(place, "stored_length is not the part's length", expected, found)
        return self._past_the_end(place, record.file, record.offset, record.stored_length)

    def _past_the_end(self, place: str, file: int, offset: int, length: int) -> PackError:
        name, end = self.files[file][:2]
        found = f"bytes {offset:,} to {offset + length:,}"
        return self._error(place, f"ends past the end of {name}", f"<= {end:,}", found)

    def _error(
        self, place: str, problem: str, expected: object = None, found: object = None
    ) -> PackError:
        return PackError(problem, path=self.path, place=place, expected=expected, found=found)


def _padded(record: struct.Struct, length: int) -> struct.Struct:
    """Return what unpacks records of `length` bytes, of which only the first are known here."""
    return struct.Struct(f"{record.format}{length - record.size}x")
