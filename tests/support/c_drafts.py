"""Changes of packs that the C reader's tests share: codecs, and files of second places."""

from moepack.format import records
from tests.support.pack_draft import Change, Draft, Piece, added, all_of


def codecs(*names: bytes, flags: int = records.SECTION_REQUIRED, missing: int = 0) -> Change:
    """State codecs, and a digest of stored bytes for each part, or for `missing` fewer."""

    def change(draft: Draft) -> None:
        count = draft.sections["parts"].record_count - missing
        data = b"".join(name.ljust(32, b"\0") for name in names)
        digests = Piece(b"stored_digests", bytes(8 * count), 8, 0)
        added(Piece(b"codecs", data, 32, flags), digests)(draft)

    return change


def stored_in(length: int, part: int = 0, *, codec: int = 1) -> Change:
    """State that zstd stores a part in some bytes."""

    def change(draft: Draft) -> None:
        held = draft.get("part", part)
        record = held._replace(stored_length=length, codec=codec)
        records.PART.pack_into(draft.index, draft.at("part", part), *record)

    return all_of(codecs(b"zstd"), change)


def each(name: bytes, length: int, *, more: int = 0, of: tuple[str, ...] = ("parts",)) -> Change:
    """Add a section of zeros with a record for each of some others, and `more`."""

    def change(draft: Draft) -> None:
        count = sum(draft.sections[section].record_count for section in of) + more
        added(Piece(name, bytes(count * length), length, 0))(draft)

    return change


def second_file(draft: Draft) -> None:
    """Add a file of second places, which is missing, in which the first part lies again."""
    pieces = {piece.name.rstrip(b"\0").decode(): piece for piece in draft.pieces()}
    alignment = draft.header.part_alignment
    record = records.FileRecord(b"second.bin", alignment, records.SECOND_FILE, 0).pack()
    number = pieces["files"].record_count
    pieces["files"] = pieces["files"]._replace(data=pieces["files"].data + record)
    places = records.SecondPlaceRecord(1 + number, 0).pack()
    places = places.ljust(16 * pieces["parts"].record_count, b"\0")
    draft.body["files"].append({"name": "second.bin", "length": alignment})
    draft.rebuild([*pieces.values(), Piece(b"second_places", places, 16, 0)])
