"""What is broken, or done in another way, in packs that are not the plain one.

Frames are put together by hand, so that no version of zstd has a say in them.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import xxhash

from tests.support.pack_draft import Draft, Piece, more, moved, record, set_rank, without

Change = Callable[[Draft], object]
OPENING, USE, VERIFICATION = "refused at opening", "refused at use", "found by verification"
BLOBS, DENSE = "experts-00000.bin", "dense.bin"
PART_LENGTH = 512
"""Of the parts of the pack `zstd`, whose gates are all of one byte."""
GATES = (0, 3, 6, 9)
"""The numbers of these parts."""
ZSTD = bytes.fromhex("28b52ffd")
SINGLE_SEGMENT, SIZE_OF_4_BYTES = 0x20, 0x80
CHECKSUM, RESERVED, DICTIONARY = 0x04, 0x08, 0x01


class Variant(NamedTuple):
    """One rule broken in a sound pack, `base`: who finds it, and what was asked for then."""

    base: str
    name: str
    breaks: Change
    verdict: str
    asked_for: str | None
    about: str


# Frames.


def repeated(length: int, *, is_last: bool = True) -> bytes:
    """Make a block of one byte again and again."""
    return (length << 3 | 1 << 1 | is_last).to_bytes(3, "little") + b"\7"


def frame(flags: int = SINGLE_SEGMENT, fields: bytes = b"", blocks: bytes | None = None) -> bytes:
    """Make a frame of the bytes of a gate; `fields` stand between its flags and its size."""
    head = ZSTD + bytes([SIZE_OF_4_BYTES | flags]) + fields + struct.pack("<I", PART_LENGTH)
    return head + (blocks or repeated(PART_LENGTH))


def skippable() -> bytes:
    """Make a frame that readers of other zstd files pass over."""
    return bytes.fromhex("502a4d18") + struct.pack("<I", 4) + b"skip"


CHECKSUM_OF_GATES = struct.pack("<I", xxhash.xxh64_intdigest(b"\7" * PART_LENGTH) & 0xFFFFFFFF)
SOUND_FRAMES = (
    frame(SINGLE_SEGMENT | CHECKSUM) + CHECKSUM_OF_GATES,
    frame(SINGLE_SEGMENT | DICTIONARY, b"\0"),
    frame(0, bytes([16 << 3])),
    frame(blocks=repeated(500, is_last=False) + repeated(12, is_last=False) + b"\1\0\0"),
)
"""With a checksum; a Dictionary_ID of 0; a window of 64 MiB; three blocks, of them one empty."""


def stored(data: bytes, number: int = 0) -> Change:
    """Return what stores a part in other bytes, with a right digest of these."""

    def change(draft: Draft) -> None:
        part = draft.get("part", number)
        path = draft.path / draft.body["files"][part.file]["name"]
        file = bytearray(path.read_bytes())
        file[part.offset : part.offset + part.stored_length] = bytes(part.stored_length)
        assert not any(file[part.offset : part.offset + len(data)]), "no room"
        file[part.offset : part.offset + len(data)] = data
        path.write_bytes(file)
        if part.stored_length != len(data):
            draft.set("part", number, stored_length=len(data))
        at = draft.sections["stored_digests"].offset + 8 * number
        draft.index[at : at + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(data))

    return change


BROKEN_FRAMES = {
    "dictionary": (frame(SINGLE_SEGMENT | DICTIONARY, b"\7"), "a frame that needs a dictionary"),
    "no-size": (
        ZSTD + b"\0\0" + repeated(PART_LENGTH),
        "a frame that does not state its content size",
    ),
    "window": (frame(0, bytes([16 << 3 | 1])), "a frame with a window of 72 MiB"),
    "reserved-bit": (
        frame(SINGLE_SEGMENT | RESERVED),
        "a frame whose header has the reserved bit",
    ),
    "checksum": (
        frame(SINGLE_SEGMENT | CHECKSUM) + bytes(4),
        "a frame with the checksum of other bytes",
    ),
    "skippable-frame-first": (skippable() + frame(), "a skippable frame before the frame"),
    "after-the-frame": (frame() + b"\0", "a byte after the frame"),
    "two-frames": (frame() + frame(blocks=b"\1\0\0"), "a second frame after the first"),
    "cut": (frame()[:-1], "a frame without its last byte"),
}


# Shards as they are.


def longer(name: str) -> Change:
    """Return what appends a zero to a file, and says so nowhere."""

    def change(draft: Draft) -> None:
        with open(draft.path / name, "ab") as file:
            file.write(b"\0")

    return change


def dirty_padding(name: str) -> Change:
    """Return what writes after the bytes of a norm in the only shard, where padding is."""

    def change(draft: Draft) -> None:
        tensor = draft.get("tensor", 1)
        end = tensor.shard_offset + tensor.length
        path = draft.path / name
        data = bytearray(path.read_bytes())
        assert tensor.length == 16
        assert not any(data[end : end + 16]), "no padding"
        data[end] = 1
        path.write_bytes(data)

    return change


def other_length(draft: Draft) -> None:
    """State that a shard ends before the padding after its last tensor."""
    draft.body["source"]["shards"][2]["length"] -= 16


def of_two_shards(draft: Draft) -> None:
    """Add a tensor without elements, which lies in the file of the first shard, of the second."""
    more("tensors")(draft)
    number = draft.sections["tensors"].record_count - 1
    first = draft.get("tensor", 0)
    empty = xxhash.xxh3_64_intdigest(b"")
    place = {"file": first.file, "offset": first.offset, "shard_offset": first.offset}
    size = {"dimension_count": 1, "ne0": 0, "ne1": 0, "length": 0, "stored_length": 0}
    digest = 0 if draft.get("file", first.file).flags else empty
    shard = (first.shard + 1) % 3
    draft.set("tensor", number, name=b"empty", digest=digest, shard=shard, **place, **size)


def unmeasured_first(draft: Draft) -> None:
    """Let a blob that was not measured change ranks with one that was, and was never chosen."""
    one, two = draft.get("blob", 2), draft.get("blob", 0)
    assert one.hotness == two.hotness == 0
    draft.set("blob", 2, rank=two.rank)
    draft.set("blob", 0, rank=one.rank)
    set_rank(draft, one.rank, 0)
    set_rank(draft, two.rank, 2)


VARIANTS = (
    *(
        Variant("zstd", name, stored(data), USE, "experts", about)
        for name, (data, about) in BROKEN_FRAMES.items()
    ),
    Variant(
        "over-shards",
        "shard-bytes",
        record("shard_bytes", 0, shard=4096),
        OPENING,
        None,
        "a record of shard bytes with a shard beyond all numbers",
    ),
    Variant(
        "over-shards",
        "length",
        other_length,
        VERIFICATION,
        None,
        "a shard that is shorter in the manifest than the file that it is",
    ),
    Variant(
        "over-shards",
        "two-shards",
        of_two_shards,
        VERIFICATION,
        None,
        "a file of kind 1 in which a tensor without elements is of another shard",
    ),
    Variant(
        "both-kinds",
        "length",
        longer("shard.gguf"),
        OPENING,
        None,
        "a shard that is a byte longer than stated, and whose header lies in dense.bin",
    ),
    Variant(
        "both-kinds",
        "gap",
        dirty_padding("shard.gguf"),
        VERIFICATION,
        None,
        "padding in a shard as it is that is not zero, while tensors lie in dense.bin",
    ),
    Variant(
        "half-measured",
        "hotness",
        moved("blob", 0, hotness=1),
        VERIFICATION,
        None,
        "the hotness of a blob whose family was not measured",
    ),
    Variant(
        "half-measured",
        "unmeasured-first",
        unmeasured_first,
        VERIFICATION,
        None,
        "a blob that was not measured at a rank before one that was",
    ),
)


# Sound packs.


def with_other_frames(draft: Draft) -> None:
    """Store the gates in frames that other writers may make."""
    for number, data in zip(GATES, SOUND_FRAMES, strict=True):
        stored(data, number)(draft)


def without_section(name: str) -> Change:
    """Return what leaves out the tensors or the shard bytes, with their bytes."""

    def change(draft: Draft) -> None:
        kind = {"tensors": "tensor"}.get(name, name)
        path = draft.path / DENSE
        data = bytearray(path.read_bytes())
        for number in range(draft.sections[name].record_count):
            held = draft.get(kind, number)
            data[held.offset : held.offset + held.length] = bytes(held.length)
        path.write_bytes(data)
        without(name)(draft)
        draft.body["whole"] = False

    return change


def stored_digests_alone(draft: Draft) -> None:
    """State the digests of stored bytes, though nothing is stored by a codec."""
    count = draft.sections["parts"].record_count
    digests = b"".join(struct.pack("<Q", draft.get("part", n).digest) for n in range(count))
    draft.rebuild([*draft.pieces(), Piece(b"stored_digests", digests, 8, 0)])


def without_digests(draft: Draft) -> None:
    """State that the digests of what lies in the first file are not known."""
    draft.set("file", 0, flags=1)
    for number in range(draft.sections["parts"].record_count):
        if draft.get("part", number).file == 0:
            draft.set("part", number, digest=0)


def manifest_at_its_limits(draft: Draft) -> None:
    """State what is allowed, and means little or nothing."""
    most = (1 << 63) - 1
    draft.body["source"] |= {
        "experts_used": {"ffn_exps": [0, None, most], "attn_v_exps": most, "org.example.x": []},
        "mtp_layers": [most, 0, 7, 0],
        "context_length": most,
    }
    draft.body["hotness"] = {"measured_blob_count": None, "blob_count": 4, "token_count": "few"}
    draft.body["index"] |= {"sha256": None, "pages": None}
    draft.body["signature"] = [{"of": "whatever"}]


def changed(
    make: Callable[[list[Path], Path], object], change: Change, *, in_index: bool = True
) -> Callable[[list[Path], Path], None]:
    """Return what makes a pack and changes it."""

    def make_and_change(shards: list[Path], target: Path) -> None:
        make(shards, target)
        draft = Draft(target)
        change(draft)
        if in_index:
            draft.save()
        else:
            draft.save_manifest()

    return make_and_change
