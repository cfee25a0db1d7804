"""GGUFs with one fault each."""

import dataclasses
import struct
from typing import Any, NamedTuple

from moepack.source import gguf_header
from tests.support.gguf_builder import F32, Q8_0, GgufBuilder, TensorSpec, moe


class Broken(NamedTuple):
    """A file that breaks one rule, and words of the place, the problem and so on in the message."""

    name: str
    data: bytes
    place: str
    problem: str
    expected: str = ""
    found: str = ""
    hint: str = ""


def small() -> GgufBuilder:
    """Make a sound model of 1 kB: six F32 tensors at 0, 128, 160, 224, 288 and 352 of its data."""
    return moe((0,), 2, ne=(4, 2), type_id=F32, block=(1, 4))


def numbered(type_id: int, rest: bytes) -> bytes:
    """Return a file whose value of `test.key` has a type's number and then `rest`."""
    return small().put("test.key", "raw", struct.pack("<I", type_id) + rest).bytes()


def array(type_id: int, count: int, items: bytes = b"") -> bytes:
    """Return a file whose `test.key` is an array that claims `count` items."""
    return numbered(9, struct.pack("<IQ", type_id, count) + items)


def aligned(type_name: str, value: Any) -> bytes:
    return small().put("general.alignment", type_name, value).bytes()


def with_tensor(number: int, **fields: Any) -> bytes:
    """Return a file in which fields of one tensor are other than they should be."""
    builder = small()
    builder.tensors[number] = dataclasses.replace(builder.tensors[number], **fields)
    return builder.bytes()


def named(name: str) -> bytes:
    return with_tensor(1, name=name)


def with_last(dims: tuple[int, ...], type_id: int = F32, data: bytes = b"") -> bytes:
    """Return a file with one more tensor at its end."""
    builder = small()
    builder.tensors.append(TensorSpec("last", dims, type_id, data))
    return builder.bytes()


def keyed(key: str) -> bytes:
    return small().put(key, "u32", 1).bytes()


def reordered() -> bytes:
    builder = small()
    builder.tensors[2].offset, builder.tensors[3].offset = 224, 160
    return builder.bytes()


def unknown_then(offset: int) -> bytes:
    """Return a file whose last tensor has this offset, behind one of an unknown type at 128."""
    builder = GgufBuilder().tensor("a", (4, 8), F32, 16).tensor("u", (4, 8), 999, 4)
    builder.tensor("b", (4,), F32, 16).tensors[2].offset = offset
    builder.trailing = bytes(max(0, offset - 160))
    return builder.bytes()


def long_name() -> bytes:
    """Return a file whose last tensor's name claims to be very long."""
    name = b"output_norm.weight"
    wrong = struct.pack("<Q", 1 << 63) + name
    return small().bytes().replace(_string(name), wrong)


def counting(field: str, count: int) -> bytes:
    builder = small()
    setattr(builder, field, count)
    return builder.bytes()


def _string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


LONGEST = gguf_header.MAX_KEY_LENGTH
SAFETENSORS = struct.pack("<Q", 9) + b'{"a":{}}\n'
KEY = "'test.key'"
LONG, HUGE = struct.pack("<Q", 5000), struct.pack("<Q", (1 << 64) - 8)
CUT_PAIRS = dataclasses.replace(small(), tensors=[], pair_count=6, trailing=bytes(8))
TWO_GIB = GgufBuilder(metadata=[("general.alignment", "u32", 1 << 31)])
TWO_KEYS = GgufBuilder(metadata=[("twice", "u32", 1), ("twice", "u32", 1)])
STARTS = [
    *(
        Broken(name, data, "byte 0", problem, hint=hint)
        for name, data, problem, hint in (
            ("an empty file", b"", "an empty file", "download it again"),
            ("other magic", GgufBuilder(magic=b"GGUX").bytes(), "not a GGUF", "ends in .gguf"),
            (
                "a web page",
                b"<!DOCTYPE html><p>Log in</p>",
                "a web page",
                "download the file again",
            ),
            (
                "an LFS pointer",
                b"version https://git-lfs.github.com/spec/v1",
                "LFS",
                "git lfs pull",
            ),
            ("a zip", b"PK\3\4" + bytes(60), "archive", "unpack it first: unzip"),
            ("a gzip", b"\x1f\x8b" + bytes(60), "archive", "unpack it first: gunzip"),
            ("a zstd", b"\x28\xb5\x2f\xfd" + bytes(60), "archive", "unpack it first: unzstd"),
            ("safetensors", SAFETENSORS, "safetensors", "convert_hf_to_gguf.py"),
            ("zeros", bytes(5000), "zeros", "download it again"),
        )
    ),
    Broken("version 1", GgufBuilder(version=1).bytes(), "version", "version", "2 or 3", "1"),
    Broken("version 4", GgufBuilder(version=4).bytes(), "version", "version", "2 or 3", "4"),
    Broken("big-endian", GgufBuilder(version=3 << 24).bytes(), "version", "big-endian", "2 or 3"),
]
COUNTS = [
    Broken(f"{field} {count}", counting(field, count), place, "out of bounds", "<=", str(count))
    for field, place in (("tensor_count", "tensor count"), ("pair_count", "key-value count"))
    for count in (100, (1 << 64) - 1, 1 << 63, 1 << 31)
]
PAIRS = [
    Broken("an empty key", keyed(""), "key 5", "empty"),
    Broken("a long key", keyed("k" * (LONGEST + 1)), "key 5", "too long", f"{LONGEST:,}"),
    Broken("a key not in UTF-8", keyed("k\udcff"), "key 5", "not UTF-8"),
    Broken("a key twice", TWO_KEYS.bytes(), "key 'twice'", "twice"),
    Broken("value type 13", numbered(13, bytes(8)), KEY, "value type", "0 to 12", "13"),
    Broken("value type -1", numbered(0xFFFFFFFF, bytes(8)), KEY, "value type"),
    Broken("an array of arrays", array(9, 1, bytes(12)), KEY, "nested"),
    Broken("an array of type 13", array(13, 1, bytes(8)), KEY, "value type", "", "13"),
    Broken("2^60 u64 past the end", array(10, 1 << 60), KEY, "longer", "<=", str(1 << 60)),
    Broken("2^61 u64, a product of 0", array(10, 1 << 61), KEY, "longer", "<="),
    Broken("2^40 strings", array(8, 1 << 40), KEY, "longer", "<=", str(1 << 40)),
    Broken("a long item", array(8, 2, _string(b"one") + LONG), KEY, "longer than", "", "5000"),
    Broken("an item of 2^64-8", array(8, 2, HUGE + _string(b"two")), KEY, "longer than the file"),
    Broken("a long string past the end", numbered(8, LONG), KEY, "long"),
    Broken("a string of 2^64-1", numbered(8, struct.pack("<Q", (1 << 64) - 1)), KEY, ""),
    Broken("alignment 0", aligned("u32", 0), "general.alignment", "alignment", "power", "0"),
    Broken("alignment 3", aligned("u32", 3), "general.alignment", "alignment", "power", "3"),
    Broken("alignment 2^31", TWO_GIB.bytes(), "general.alignment", "alignment", "power"),
    Broken("alignment as i32", aligned("i32", 32), "general.alignment", "type", "u32", "i32"),
    Broken("alignment as text", aligned("str", "32"), "general.alignment", "type", "u32", "str"),
    Broken("alignments", aligned("arr:u32", [32]), "general.alignment", "type", "u32", "arr"),
    Broken("pairs that end in the file", CUT_PAIRS.bytes()[:-4], "key 5", "cut short"),
]
NAMES = [
    Broken("no name", named(""), "tensor ''", "empty"),
    Broken("a name of 256 bytes", named("n" * 256), "tensor 1", "too long", "255", "256"),
    Broken("a name of 2^63 bytes", long_name(), "tensor 5", "too long", "255", f"{1 << 63:,}"),
    Broken("a name with NUL", named("a\0b"), r"tensor 'a\x00b'", "NUL"),
    Broken("a name upwards", named("../x"), "tensor '../x'", "path upwards"),
    Broken("a name of two dots", named(".."), "tensor '..'", "path upwards"),
    Broken("a name upwards inside", named("a/../../x"), "tensor 'a/", "path upwards"),
    Broken("a name not in UTF-8", named("\udcff"), "tensor 1", "not UTF-8"),
    Broken("a name twice", named("token_embd.weight"), "'token_embd.weight'", "twice"),
    Broken("the last name twice", named("output_norm.weight"), "'output_norm.weight'", "twice"),
]
DIMENSIONS = [
    Broken("five dimensions", with_last((1,) * 5, data=bytes(4)), "'last'", "dimensions", "4", "5"),
    Broken("2^32-1 dimensions", with_tensor(1, count_of_dims=0xFFFFFFFF), "attn_norm", "<= 4"),
    Broken("a negative dimension", with_last(((1 << 64) - 1,)), "'last'", "dimensions", "2^63"),
    Broken("2^63 elements", with_last((1 << 32, 1 << 31)), "'last'", "dimensions", "2^63"),
    Broken("2^64 elements", with_last((1 << 32, 1 << 32)), "'last'", "dimensions", "2^63"),
    Broken("2^124 elements, or none", with_last((1 << 62, 1 << 62, 0)), "'last'", "dimensions"),
    Broken("2^64 bytes", with_last((1 << 62,)), "'last'", "too long", "2^63", f"{1 << 64:,}"),
    Broken("2^63 bytes", with_last((1 << 61,)), "'last'", "too long", "2^63", f"{1 << 63:,}"),
    Broken("half a block", with_last((33,), Q8_0, bytes(68)), "'last'", "blocks", "32", "33"),
]
OFFSETS = [
    Broken("an unaligned offset", with_tensor(1, offset=129), "attn_norm", "gap", "128", "129"),
    Broken("an overlap", with_tensor(1, offset=96), "attn_norm", "overlap", "128", "96"),
    Broken("the same offset twice", with_tensor(1, offset=0), "attn_norm", "overlap", "128", "0"),
    Broken("a gap", with_tensor(2, offset=192), "ffn_gate", "gap", "160", "192"),
    Broken("unaligned behind an unknown type", unknown_then(161), "'b'", "aligned", "32", "161"),
    Broken("an overlap with an unknown type", unknown_then(96), "'u'", "overlap", "", "32 bytes"),
    Broken("the first one late", with_tensor(0, offset=32), "token_embd", "gap", "0", "32"),
    Broken("data in another order", reordered(), "ffn_gate", "overlap", "160", "224"),
    Broken("an offset past the end", with_tensor(5, offset=1 << 40), "output_norm", "gap", "352"),
    Broken("an offset of 2^64-32", with_tensor(5, offset=(1 << 64) - 32), "output_norm", "", "352"),
    Broken("a first offset of 2^64-32", with_tensor(0, offset=(1 << 64) - 32), "embd", "", "0"),
    Broken("a tensor past the end", with_last((8, 8)), "'last'", "ends inside", "", ""),
    Broken("data cut short", small().bytes()[:-17], "output_norm", "ends inside", "", ""),
    Broken("no data at all", small().header(), "output_norm", "ends inside"),
    Broken("an end inside the padding", small().header()[:-1], "output_norm", "ends inside"),
    Broken("bytes behind", small().bytes() + b"\0", "output", "follow"),
    Broken("another alignment than stated", aligned("u32", 64), "ffn_gate", "gap", "192", "160"),
]
BROKEN = [*STARTS, *COUNTS, *PAIRS, *NAMES, *DIMENSIONS, *OFFSETS]
