"""Changes to packs that break one rule, or do something in another way that is allowed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from tests.support.pack_draft import (
    Draft,
    later,
    more,
    moved,
    record,
    set_rank,
    without,
)

Change = Callable[[Draft], object]
OPENING, USE, VERIFICATION = "refused at opening", "refused at use", "found by verification"
BLOBS, DENSE = "experts-00000.bin", "dense.bin"


class Broken(NamedTuple):
    """A pack with one rule broken: the change, the verdict, and the request that is refused."""

    name: str
    breaks: Change
    verdict: str
    asked_for: str | None
    about: str


Changes = dict[str, tuple[Change, str]]
"""By name: a change, and a text about it."""


def broken(group: str, verdict: str, asked_for: str | None, changes: Changes) -> Iterator[Broken]:
    """Yield the broken packs of a group."""
    for name, (change, about) in changes.items():
        yield Broken(f"broken-{group}-{name}", change, verdict, asked_for, about)


# Files, and shards as they are.


@later
def edited(draft: Draft, name: str, change: Callable[[bytearray], object]) -> None:
    """Change the bytes of a file, and no digest."""
    data = bytearray((draft.path / name).read_bytes())
    before = bytes(data)
    change(data)
    assert data != before
    (draft.path / name).write_bytes(data)


def flipped(at: int) -> Callable[[bytearray], object]:
    """Flip a bit of a byte."""
    return lambda data: data.__setitem__(at, data[at] ^ 1)


def removed(name: str) -> Change:
    """Remove a file."""
    return lambda draft: (draft.path / name).unlink()


@later
def dirty_gap(draft: Draft, name: str) -> None:
    """Write into the padding after the first tensor of a shard."""
    number = [entry["name"] for entry in draft.body["files"]].index(name)
    count = draft.sections["tensors"].record_count
    tensors = [draft.get("tensor", n) for n in range(count)]
    end = min(tensor.offset + tensor.length for tensor in tensors if tensor.file == number)
    assert not any((draft.path / name).read_bytes()[end : end + 16]), "no padding"
    edited(name, lambda data: data.__setitem__(end, 1))(draft)


def longer(name: str) -> Change:
    """Append a zero to a file."""
    return edited(name, lambda data: data.append(0))


@later
def dirty_padding(draft: Draft, name: str) -> None:
    """Write after the bytes of a norm in the only shard, where padding is."""
    tensor = draft.get("tensor", 1)
    end = tensor.shard_offset + tensor.length
    assert tensor.length == 16
    assert not any((draft.path / name).read_bytes()[end : end + 16]), "no padding"
    edited(name, lambda data: data.__setitem__(end, 1))(draft)


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


SHARD = "shard-00002-of-00003.gguf"
LOST: Changes = {
    "no-shard": (removed(SHARD), "a shard that is missing"),
    "cut": (edited(SHARD, lambda d: d.pop()), "a shard that is a byte short"),
    "header": (edited(SHARD, flipped(40)), "another header of a shard"),
}
ELSEWHERE: Changes = {
    "elsewhere": (
        moved("tensor", 1, offset=16),
        "a tensor that lies elsewhere in its shard than it lay",
    ),
    "gap": (dirty_gap(SHARD), "a byte of a shard that no record covers, and that is not zero"),
}
BEYOND: Changes = {
    "shard-bytes": (
        record("shard_bytes", 0, shard=4096),
        "a record of shard bytes with a shard beyond all numbers",
    )
}
OTHER_SHARDS: Changes = {
    "length": (other_length, "a shard that is shorter in the manifest than the file that it is"),
    "two-shards": (
        of_two_shards,
        "a file of kind 1 in which a tensor without elements is of another shard",
    ),
}
LONGER: Changes = {
    "length": (
        longer("shard.gguf"),
        "a shard that is a byte longer than stated, and whose header lies in dense.bin",
    )
}
PADDING: Changes = {
    "gap": (
        dirty_padding("shard.gguf"),
        "padding in a shard as it is that is not zero, while tensors lie in dense.bin",
    )
}
HOTNESS: Changes = {
    "hotness": (moved("blob", 0, hotness=1), "the hotness of a blob whose family was not measured"),
    "unmeasured-first": (
        unmeasured_first,
        "a blob that was not measured at a rank before one that was",
    ),
}
VARIANTS: tuple[tuple[str, str, str | None, Changes], ...] = (
    ("over-shards", OPENING, None, LOST),
    ("over-shards", VERIFICATION, None, ELSEWHERE),
    ("over-shards", OPENING, None, BEYOND),
    ("over-shards", VERIFICATION, None, OTHER_SHARDS),
    ("both-kinds", OPENING, None, LONGER),
    ("both-kinds", VERIFICATION, None, PADDING),
    ("half-measured", VERIFICATION, None, HOTNESS),
)
"""Sound packs, and changes to break each of them."""


# Sound packs.


@later
def without_section(draft: Draft, name: str) -> None:
    """Leave out the tensors or the shard bytes, with their bytes."""
    kind = {"tensors": "tensor"}.get(name, name)
    for number in range(draft.sections[name].record_count):
        entry = draft.get(kind, number)
        draft.write(entry.file, entry.offset, bytes(entry.length))
    without(name)(draft)
    draft.body["whole"] = False


def without_digests(draft: Draft) -> None:
    """Mark the digests of the first file as unknown."""
    draft.set("file", 0, flags=1)
    for number in range(draft.sections["parts"].record_count):
        if draft.get("part", number).file == 0:
            draft.set("part", number, digest=0)


def manifest_at_its_limits(draft: Draft) -> None:
    """Write values that are allowed and mean little or nothing."""
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
    """Return a function that makes a pack and changes it."""

    def make_and_change(shards: list[Path], target: Path) -> None:
        make(shards, target)
        draft = Draft(target)
        change(draft)
        if in_index:
            draft.save()
        else:
            draft.save_manifest()

    return make_and_change
