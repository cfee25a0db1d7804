"""Every rule of the pack's format, broken alone, with the message of readers."""

from collections.abc import Callable, Mapping
from functools import partial

from moepack.common import digest
from moepack.pack.format import records
from tests.support.pack_draft import (
    Draft,
    Piece,
    Rule,
    added,
    all_of,
    counted,
    cut_to,
    dirty_gap,
    fewer,
    header,
    later,
    more,
    move_part,
    moved,
    own_tensors,
    pushed,
    record,
    renamed,
    resized,
    section,
    set_rank,
    shifted,
    stated,
    strong_digests,
    without,
    without_blobs,
)

BIG = (1 << 64) - 1
NAME_PROBLEMS = {
    "no name": (b"", "an empty name"),
    "not UTF-8": (b"\xff", "a name is not UTF-8"),
    "more after the name": (b"a\0b", "a name is not padded with zeros"),
    "several lines": (b"a\nb", "not a name"),
    "an escape": (b"\x1b[2J", "not a name"),
    "other letters": ("ä".encode(), "not a name"),
    "a blank": (b"a b", "not a name"),
}
BAD_NAMES = {
    "upwards": "../x",
    "a path": "a/b",
    "absolute": "/etc/passwd",
    "a path elsewhere": "a\\b",
    "a drive": "C:x",
    "the folder": ".",
    "the folder above": "..",
    "hidden": ".bin",
    "with a line feed": "a\nb",
    "with an escape": "\x1b[2J",
    "with a turn of direction": "a\u202eb",
    "of the index": "index.bin",
    "of the manifest": "manifest.json",
    "of the manifest, loud": "MANIFEST.JSON",
    "of the manifest to be": "manifest.json.tmp",
    "of the journal": "pack.journal",
    "of a device": "con",
    "of a device with an ending": "Aux.bin",
    "of a port": "com0.a.bin",
    "of a printer": "LPT9",
    "with a point at its end": "a.",
}
Change = Callable[[Draft], object]


def rules(table: Mapping[tuple[str, str], Mapping[str, Change]]) -> list[Rule]:
    """Return the rules in a table: by place and problem, changes by their names."""
    return [
        Rule(name, change, place, problem)
        for (place, problem), changes in table.items()
        for name, change in changes.items()
    ]


def at(place: str, *rows: tuple[str, Change, str]) -> list[Rule]:
    """Return the rules of one place: name, change and problem of each."""
    return [Rule(name, change, place, problem) for name, change, problem in rows]


def name_rules(kind: str, number: int, field: str, place: str, length: int) -> list[Rule]:
    """Return the rules of a name in a record, which is padded to `length`."""
    names = NAME_PROBLEMS | {"too long": (b"n" * length, "a name is not padded with zeros")}
    return [
        Rule(f"{field}: {what}", record(kind, number, **{field: name}), place, problem)
        for what, (name, problem) in names.items()
    ]


HEADER_RULES = [
    Rule("cut short", cut_to(63), "header", "the index is cut short"),
    Rule("magic", header(magic=b"MOEPACK\1"), "magic", "not a moepack index"),
    *(
        Rule(f"version {n}", header(format_version=n), "format_version", "unknown format version")
        for n in (0, 2, (1 << 32) - 1)
    ),
    *(
        Rule(f"{name} of {length}", header(**{name: length}), name, "wrong length")
        for name, lengths in {
            "header_length": (0, 48, 60, 65544, 1 << 31),
            "section_record_length": (0, 40, 52, 65544, 1 << 31),
        }.items()
        for length in lengths
    ),
    *(
        Rule(f"{n:,} sections", header(section_count=n), "section_count", "out of bounds")
        for n in (0, 257, (1 << 32) - 1)
    ),
    *at(
        "directory",
        ("a long header", header(header_length=65536), "longer than the index"),
        ("many sections", header(section_count=256), "longer than the index"),
    ),
    *at(
        "index_length",
        ("an index of more than 1 GiB", header(index_length=(1 << 30) + 8), "out of bounds"),
        ("an index of 1 GiB that is shorter", header(index_length=1 << 30), "wrong length"),
        ("a longer index", resized(64, in_header=False), "wrong length"),
        ("a shorter index", resized(-64, in_header=False), "wrong length"),
    ),
    *(
        Rule(f"{name} of {n:,}", header(**{name: n}), name, "not an alignment")
        for name in ("blob_alignment", "part_alignment", "tensor_alignment")
        for n in (0, 3, 4097, 1 << 31, 1 << 63)
    ),
    Rule("parts above blobs", header(part_alignment=8192), "part_alignment", "above the blobs'"),
    *rules(
        {
            ("directory", "ends too far in"): {
                "a directory that ends too far in": lambda draft: draft.rebuild(
                    draft.pieces(), header_more=bytes(65536 - 56)
                ),
            },
        }
    ),
]
MOST = {
    "files": records.MAX_FILES,
    "families": records.MAX_FAMILIES,
    "part_kinds": records.MAX_PART_KINDS,
    "blobs": records.MAX_BLOBS,
    "parts": records.MAX_PARTS,
    "ranks": records.MAX_BLOBS,
    "tensors": records.MAX_TENSORS,
    "shard_bytes": records.MAX_TENSORS,
}
NEEDED = [*MOST][:6]
NEW = Piece(b"news", b"12345678" * 9, 8, 0)
ELSEWHERE = "not where the section before it ends"
UNKNOWN_SECTION = "needs the section {!r}, which this reader does not know"
SECTION_RULES = [
    *(Rule(f"no {name}", without(name), name, "the section is missing") for name in NEEDED),
    Rule("a section twice", added(NEW, NEW), "news", "the section stands twice"),
    Rule("blobs twice", section("parts", name=b"blobs"), "blobs", "the section stands twice"),
    *name_rules("section", 6, "name", "section 6", 24),
    *(
        Rule(f"flags of {flags:#x}", section("tensors", flags=flags), "tensors", "unknown flags")
        for flags in (2, 3, 1 << 31)
    ),
    Rule("a flag of a new section", added(NEW._replace(flags=2)), "news", "unknown flags"),
    *(
        Rule(f"{name}, short records", section(name, record_length=n), name, "wrong record length")
        for name, n in zip(MOST, (264, 56, 144, 24, 24, 2, 368, 32), strict=True)
    ),
    *(
        Rule(f"{name}, uneven records", section(name, record_length=n), name, "wrong record length")
        for name, n in {"files": 276, "blobs": 36, "parts": 33, "ranks": 6, "tensors": 380}.items()
    ),
    *(Rule(f"no {name} in it", counted(name, 0), name, "count out of bounds") for name in NEEDED),
    *(
        Rule(f"{n:,} {name}", counted(name, n), name, "count out of bounds")
        for name, most in MOST.items()
        for n in (most + 1, BIG)
    ),
    *(
        Rule(f"{name} moved by {step}", pushed(name, step), name, ELSEWHERE)
        for name in MOST
        for step in (64, -64, 8)
    ),
    *(
        Rule(f"{name} nowhere", section(name, offset=offset), name, ELSEWHERE)
        for name, offset in {"blobs": (1 << 64) - 64, "parts": 0}.items()
    ),
    *(
        Rule(f"{name} past the end", counted(name, 65536), name, "ends past the index")
        for name in ("blobs", "parts", "ranks", "tensors", "shard_bytes")
    ),
    *(
        Rule(f"bytes before {what}", dirty_gap(what), what, "bytes before it are not zero")
        for what in ("files", "families", "the trailer")
    ),
    *rules(
        {
            ("index_length", "does not fit the sections"): {
                "a longer index, stated": resized(64, in_header=True),
                "a shorter index, stated": resized(-8, in_header=True),
            },
            ("directory", UNKNOWN_SECTION.format("news")): {
                "a new section that is required": added(NEW._replace(flags=1)),
            },
            ("directory", UNKNOWN_SECTION.format("signs")): {
                "an empty section that is required": added(Piece(b"signs", b"", 8, 1)),
            },
            ("directory", UNKNOWN_SECTION.format("codec-zstd")): {
                "a codec": added(Piece(b"codec-zstd", b"", 8, 1)),
            },
            ("directory", "does not begin with files, families and part_kinds"): {
                "families first": lambda draft: draft.rebuild(
                    draft.pieces()[1::-1] + draft.pieces()[2:]
                ),
            },
            ("strong_digests", "not one for each part, tensor and shard bytes"): {
                "a strong digest too few": added(Piece(b"strong_digests", bytes(32 * 12), 32, 0)),
            },
            ("news", "record length out of bounds"): {
                f"records of {n:,} bytes": all_of(added(NEW), section("news", record_length=n))
                for n in (0, 65537, (1 << 32) - 1)
            },
            ("news", "ends past the index"): {
                "a new section of 2^64 records": all_of(added(NEW), counted("news", BIG)),
            },
            ("ranks", "not one for each blob"): {
                "a blob without a rank": fewer("ranks"),
                "no blob without a rank": more("ranks"),
            },
        }
    ),
]
NOT_PADDED = "a name is not padded with zeros"
FILE_RULES = [
    *at(
        "file 0",
        ("no name", record("file", 0, name=b""), "an empty name"),
        ("a name of 256 bytes", record("file", 0, name=b"n" * 256), NOT_PADDED),
        ("bytes after a name", record("file", 0, name=b"a\0b"), NOT_PADDED),
        ("a name not in UTF-8", record("file", 0, name=b"\xff"), "a name is not UTF-8"),
    ),
    *(
        Rule(f"kind {n}", record("file", 0, kind=n), "file 0", "unknown kind of file")
        for n in (3, 2, (1 << 32) - 1)
    ),
    *(
        Rule(f"flags {n}", record("file", 0, flags=n), "file 0", "unknown flags")
        for n in (2, 3, 1 << 31)
    ),
    *(
        Rule(f"a length of {n:,}", record("file", 0, length=n), "file 0", "length out of bounds")
        for n in (0, 1 << 63, BIG)
    ),
    *rules(
        {
            ("file 1", "not a plain file name"): {
                f"a name {what}": renamed(name) for what, name in BAD_NAMES.items()
            },
            ("files", "two files have the same name"): {
                "a name twice": renamed("experts-00000.bin"),
                "a name twice, loud": renamed("Experts-00000.BIN"),
            },
        }
    ),
]
ADD_UP = "the families' records do not add up to the section's count"
FAMILY_RULES = [
    *(
        Rule(f"{name} of {n:,}", record("family", 0, **{name: n}), f"family 0: {name}", problem)
        for name, numbers, problem in (
            ("expert_count", (0, 65537, (1 << 32) - 1), "out of bounds"),
            ("parts_per_blob", (0, 65, (1 << 32) - 1), "out of bounds"),
        )
        for n in numbers
    ),
    Rule("a layer of 65,536", record("family", 1, layer=65536), "family 1: layer", "out of bounds"),
    *at(
        "blobs",
        ("an expert too many", record("family", 1, expert_count=3), ADD_UP),
        ("an expert too few", record("family", 1, expert_count=1), ADD_UP),
        ("a blob of no family", all_of(more("blobs"), more("ranks")), ADD_UP),
        ("a blob too few", all_of(fewer("blobs"), fewer("ranks")), ADD_UP),
    ),
    Rule("a part kind of no family", more("part_kinds"), "part_kinds", ADD_UP),
    Rule("a part of no family", more("parts"), "parts", ADD_UP),
    Rule("a part too few", fewer("parts"), "parts", ADD_UP),
    *(
        Rule(f"{name} of {n:,}", record("family", 1, **{name: n}), f"family 1: {name}", problem)
        for name, numbers, problem in (
            ("first_blob", (0, 1, (1 << 32) - 1), "not the next record"),
            ("first_part_kind", (0, 4, (1 << 32) - 1), "not the next record"),
            ("first_part", (0, 1, 1 << 63), "not the next record"),
        )
        for n in numbers
    ),
    *(
        Rule(f"flags {n}", record("family", 0, flags=n), "family 0", "unknown flags")
        for n in (2, 3, 1 << 31)
    ),
    *name_rules("family", 1, "name", "family 1", 32),
    *rules(
        {
            ("family 1", "more part kinds than the index holds"): {
                "more parts than there are": record("family", 1, parts_per_blob=4),
            },
            ("families", "not in the order of their layers"): {
                "layers in another order": record("family", 0, layer=2),
            },
            ("families", "two families have the same layer and name"): {
                "a family twice": record("family", 1, layer=0),
            },
        }
    ),
]
FIRST_KIND = "family 0: part 0"
KIND_RULES = [
    *(
        Rule(
            f"a shape {what}",
            record("part_kind", 0, **fields),
            FIRST_KIND,
            f"not a shape of {fields.get('dimension_count', 2)} dimensions",
        )
        for what, fields in {
            "without its second axis": {"dimension_count": 1},
            "without both": {"dimension_count": 0},
            "of 2^64": {"ne0": 1 << 32, "ne1": 1 << 32},
            "of 2^63": {"ne0": 1 << 63, "ne1": 1},
            "of no rows": {"ne1": 0},
            "of no columns": {"ne0": 0},
        }.items()
    ),
    *name_rules("part_kind", 0, "name", FIRST_KIND, 64),
    *name_rules("part_kind", 5, "type_name", "family 1: part 2", 24),
    *rules(
        {
            (FIRST_KIND, "dimension_count out of bounds"): {
                f"{n:,} dimensions": record("part_kind", 0, dimension_count=n)
                for n in (3, BIG >> 32)
            },
            (FIRST_KIND, "length out of bounds"): {
                f"a length of {n}": record("part_kind", 0, length=n) for n in (0, 1 << 63, BIG)
            },
            (FIRST_KIND, "unknown flags"): {
                f"flags {n}": record("part_kind", 0, flags=n) for n in (4, 1 << 31)
            },
            ("family 0", "two parts have the same name"): {
                "a name twice": record("part_kind", 1, name=b"ffn_gate_exps.weight"),
            },
            (FIRST_KIND, "shard out of bounds"): {
                f"shard {n:,}": record("part_kind", 0, shard=n) for n in (4096, (1 << 32) - 1)
            },
            (FIRST_KIND, "its origin is of two kinds, or of none"): {
                "an origin without a stride": record("part_kind", 0, stride=0),
                "an origin of both kinds": record("part_kind", 0, first_slice=1),
                "an origin with both": record("part_kind", 0, flags=2),
                "an origin with a shard as well": all_of(
                    own_tensors(), record("part_kind", 0, shard=1)
                ),
            },
            (FIRST_KIND, "end of its slices out of bounds"): {
                "slices that end at 2^64": record("part_kind", 0, shard_offset=BIG - 63),
                "slices that end at 2^63": record("part_kind", 0, shard_offset=(1 << 63) - 64),
                "slices that end at more": record("part_kind", 0, stride=BIG),
            },
        }
    ),
]
PART_7 = "part 7 (ffn_up_exps.weight)"
GATE_0 = "layer 0 expert 0 ffn_gate_exps.weight"
GATE_1 = "layer 0 expert 1 ffn_gate_exps.weight"
PAST = "ends past the end of experts-00000.bin"
OUTSIDE = "a part lies outside its blob"
RECORD_RULES = [
    Rule("a blob in no file", record("blob", 1, file=3), "blob 1", "no such file"),
    Rule("a blob past the end", moved("blob", 1, offset=1 << 20), "blob 1", PAST),
    Rule("a blob at 2^64-4096", record("blob", 1, offset=(1 << 64) - 4096), "blob 1", PAST),
    Rule("a blob too long", moved("blob", 1, length=1 << 20), "blob 1", PAST),
    *at(
        "blob 0",
        ("a blob of 2^64-4096", record("blob", 0, length=(1 << 64) - 4096), PAST),
        ("a blob unaligned", shifted("blob", 0, offset=1 / 8, length=-1), "offset not aligned"),
        ("an uneven blob", moved("blob", 0, length=-1), "length not aligned"),
        ("a blob in a shard", record("file", 0, kind=1), "a blob in a shard"),
    ),
    *at(
        "blob 0",
        ("no such rank", record("blob", 0, rank=4), "no such rank"),
        ("no such rank, and no blob", record("blob", 0, length=0, rank=4), "no such rank"),
    ),
    Rule("a part in no file", record("part", 7, file=3), PART_7, "no such file"),
    Rule("a part with a codec", record("part", 7, codec=1), PART_7, "unknown codec"),
    Rule("a rank of no blob", later(set_rank)(0, 4), "rank 0", "no such blob"),
    Rule("a rank of 2^32-1", later(set_rank)(3, 0xFFFFFFFF), "rank 3", "no such blob"),
    *rules(
        {
            ("blob 1", "no length, yet a place"): {
                "no length, but an offset": record("blob", 1, offset=4096, length=0),
                "no length, but a file": record("blob", 1, offset=0, length=0, file=1),
            },
            (PART_7, "stored_length is not the part's length"): {
                f"a part stored in {n:,} bytes": record("part", 7, stored_length=n)
                for n in (0, 31, 33, BIG)
            },
            (PART_7, "ends past the end of experts-00001.bin"): {
                f"a part at {n:,}": record("part", 7, offset=n) for n in (1 << 40, BIG - 31, BIG)
            },
            (GATE_0, OUTSIDE): {
                "a part in another file": record("part", 0, file=1),
                "a part before its blob": record("part", 0, offset=0),
            },
            (GATE_0, "a part of an expert without a blob lies in no shard"): {
                "a part without a blob, in a data file": partial(
                    without_blobs, kind=records.DATA_FILE
                ),
            },
        }
    ),
    Rule("a part after its blob", shifted("part", 3, offset=3), GATE_1, OUTSIDE),
]
NO_SLICE = "no such record in slices"
SLICE_RULES = [
    Rule("0 slices for two experts", own_tensors(0), GATE_0, NO_SLICE),
    Rule("1 slices for two experts", own_tensors(1), GATE_1, NO_SLICE),
    Rule("a shard beyond", own_tensors(shard=4096), "slices 0", "shard out of bounds"),
    *rules(
        {
            (GATE_0, NO_SLICE): {
                "a first slice beyond": all_of(
                    own_tensors(), record("part_kind", 0, first_slice=(1 << 32) - 1)
                ),
            },
            ("slices 0", "shard_offset out of bounds"): {
                "a slice at 2^63": all_of(own_tensors(), record("slice", 0, shard_offset=1 << 63)),
            },
        }
    ),
]
TENSOR = "tensor 1 (blk.0.attn_norm.weight)"
PAST_DENSE = "ends past the end of dense.bin"
DENSE_RULES = [
    *(
        Rule(f"a tensor {what}", record("tensor", 1, name=name), "tensor 1", problem)
        for what, (name, problem) in list(NAME_PROBLEMS.items())[:3]
    ),
    Rule("a long name", record("tensor", 1, name=b"n" * 256), "tensor 1", NOT_PADDED),
    *name_rules("tensor", 1, "type_name", TENSOR, 24),
    *(
        Rule(f"tensor: {what}", record("tensor", 1, **fields), TENSOR, problem)
        for what, fields, problem in (
            ("flags", {"flags": 2}, "unknown flags"),
            ("a codec", {"codec": 1}, "unknown codec"),
            (
                "stored otherwise",
                {"stored_length": 15},
                "stored_length is not the tensor's length",
            ),
            ("5 dimensions", {"dimension_count": 5}, "dimension_count out of bounds"),
            ("an axis too many", {"ne1": 1}, "not a shape of 1 dimensions"),
            ("2^63 elements", {"ne0": 1 << 63}, "not a shape of 1 dimensions"),
            ("no file", {"file": 3}, "no such file"),
            ("past the end", {"offset": 1 << 30}, PAST_DENSE),
            ("at 2^64", {"offset": BIG}, PAST_DENSE),
            ("unaligned", {"offset": 8}, "offset not aligned"),
            ("no shard", {"shard": 4096}, "shard out of bounds"),
            ("2^63 in its shard", {"shard_offset": (1 << 63) - 8}, "shard_offset out of bounds"),
        )
    ),
    *(
        Rule(f"shard bytes: {what}", record("shard_bytes", 0, **fields), "shard_bytes 0", problem)
        for what, fields, problem in (
            ("none", {"length": 0}, "length out of bounds"),
            ("no file", {"file": 3}, "no such file"),
            ("past the end", {"offset": 1 << 30}, PAST_DENSE),
            ("of 2^64", {"length": BIG}, PAST_DENSE),
            ("unaligned", {"offset": 8}, "offset not aligned"),
            ("no shard", {"shard": 4096}, "shard out of bounds"),
            ("2^63 in its shard", {"shard_offset": (1 << 63) - 8}, "shard_offset out of bounds"),
        )
    ),
    *rules(
        {
            ("tensor 1 (token_embd.weight)", "another tensor has the same name"): {
                "a tensor twice": record("tensor", 1, name=b"token_embd.weight"),
            },
        }
    ),
]
CROSS_RULES = [
    *rules(
        {
            ("files", "index and manifest list other files"): {
                "another length than in the manifest": moved("file", 0, length=4096),
                "another order than in the manifest": lambda draft: draft.body["files"].reverse(),
                "a name in the index alone": renamed("x.bin"),
            },
            ("whole", "index and manifest differ on whether the pack is whole"): {
                "not whole": stated(whole=False),
                "whole without a dense part": without("tensors"),
                "whole, with layers chosen": stated(layers=[0, 1]),
            },
            ("layers", "index and manifest list other layers"): {
                f"layers {layers}": stated(whole=False, layers=layers)
                for layers in ([], [0], [0, 1, 2], [1, 0])
            },
        }
    ),
]
LAST = "tensor blk.1.attn_norm.weight"
NORM = "tensor blk.0.attn_norm.weight"
NO_SHARD = "came from a shard that the manifest does not name"
SHARD_RULES = [
    Rule("slices of no shard", record("part_kind", 0, shard=1), GATE_0, NO_SHARD),
    Rule("a tensor of no shard", record("tensor", 1, shard=1), NORM, NO_SHARD),
    Rule("slices over each other", moved("part_kind", 0, stride=-8), GATE_1, "overlaps another"),
    Rule("a header twice", more("shard_bytes"), "header", "overlaps another"),
    Rule("a tensor twice there", moved("tensor", 2, shard_offset=-8), LAST, "overlaps another"),
    *rules(
        {
            ("header", NO_SHARD): {
                "a header of no shard": all_of(
                    more("shard_bytes"), record("shard_bytes", 1, shard=1)
                ),
            },
            ("padding at byte 512", NO_SHARD): {
                "padding of no shard": all_of(
                    more("shard_bytes"), record("shard_bytes", 1, shard=1, shard_offset=512)
                ),
            },
            ("m.gguf", "the header of a shard is missing"): {
                "no header: none": fewer("shard_bytes"),
                "no header: shorter": moved("shard_bytes", 0, length=-32),
                "no header: elsewhere": record("shard_bytes", 0, shard_offset=32),
            },
            (NORM, "ends past its shard"): {
                "a tensor past its shard": record("tensor", 1, shard_offset=1 << 40),
            },
        }
    ),
]
"""Rules that show only when shards are put together again."""


def shifted_weight(draft: Draft) -> None:
    """Move the last part of expert 1 to an offset where no weight may begin."""
    move_part(draft, 5, draft.header.blob_alignment // 8)


def swapped_parts(draft: Draft) -> None:
    """Let two parts of expert 1 change places, bytes and all."""
    parts = draft.get("part", 3), draft.get("part", 4)
    contents = [draft.read(part) for part in parts]
    for number, content, place in zip((3, 4), contents, reversed(parts), strict=True):
        draft.write(place.file, place.offset, content)
        draft.set("part", number, offset=place.offset)


def overlapping_tensors(draft: Draft) -> None:
    """Let the last tensor begin where the one before it does, with its bytes."""
    one, two = draft.get("tensor", 1), draft.get("tensor", 2)
    assert one.length == two.length
    draft.write(two.file, two.offset, bytes(two.length))
    draft.set("tensor", 2, offset=one.offset, digest=one.digest)


def of_no_length(draft: Draft) -> None:
    """Take the bytes of a tensor away, though it has elements; where they were is zero."""
    tensor = draft.get("tensor", 1)
    draft.write(tensor.file, tensor.offset, bytes(tensor.length))
    draft.set("tensor", 1, length=0, stored_length=0, digest=digest.xxh3(b""))


def more_experts_used(draft: Draft) -> None:
    draft.body["source"]["experts_used"] = {"ffn_exps": [2, 3]}


def other_page(draft: Draft) -> None:
    draft.body["index"]["pages"]["digests"][0] = "xxh3:" + "0" * 16


def strong_index(draft: Draft) -> None:
    draft.body["index"]["sha256"] = "0" * 64


# A reader relies on none of these; the verifier finds them. `place` is what its finding names.
VERIFIERS_RULES = [
    *at(
        "record: layer 0",
        ("blobs overlap", shifted("blob", 1, length=1), "the blob overlaps another"),
        ("parts in another order", swapped_parts, "the part before it"),
        ("a weight unaligned", shifted_weight, "is not aligned to"),
    ),
    *at(
        "rank: in index.bin",
        ("ranks that differ", record("blob", 0, rank=3), "its record says 3"),
        ("hotness that rises", record("blob", 3, hotness=100), "hotter than the one before it"),
        ("hotness of 2^63", record("blob", 1, hotness=1 << 63), "has a hotness of 9,223,372"),
    ),
    *at(
        "manifest: in manifest.json",
        ("more experts used than there are", more_experts_used, "a token uses 3 experts"),
        ("no hotness stated", stated(hotness=None), "it knows of no hotness"),
    ),
    Rule("a page's digest", other_page, "page 0", "does not have the digest"),
    Rule("a strong digest", strong_digests(other=5), "digest: layer 0 expert 1", "its SHA-256 is"),
    *rules(
        {
            ("record: in experts-00001.bin", "its length is not aligned"): {
                "a file's end unaligned": lambda draft: draft.lengthen(1, bytes(8)),
            },
            ("record: in dense.bin", "its length is not aligned"): {
                "the end of a file of tensors unaligned": lambda draft: draft.lengthen(2, bytes(8)),
            },
            ("rank: in index.bin", "its record says"): {
                "a rank twice": lambda d: set_rank(d, 1, d.index[d.sections["ranks"].offset]),
            },
            ("digest: layer 0 expert 1", "its digest is"): {
                "a part's digest": record("part", 4, digest=1),
            },
            ("record: tensor", "the tensor overlaps another"): {
                "a tensor over another": overlapping_tensors,
            },
            ("record: layer 0", "type 0 is F32, the record says F16"): {
                "a type of another name": record("part_kind", 0, type_name=b"F16"),
            },
            ("record: layer 0", "4 x 3 of F32 is 48 bytes long, the record says 32"): {
                "a type of another length": record("part_kind", 0, ne1=3),
            },
            ("record: layer 0", "F32 stores 1 row as one unit"): {
                "rows interleaved that are not": record("part_kind", 0, interleaved_row_count=4),
            },
            ("record: layer 0", "4 x 2 of Q4_0 is not in whole blocks of 32"): {
                "a part in less than a block": record("part_kind", 0, type_id=2, type_name=b"Q4_0"),
            },
            (f"record: {NORM}", "type 0 is F32, the record says F16"): {
                "a tensor of a type of another name": record("tensor", 1, type_name=b"F16"),
            },
            (f"record: {NORM}", "4 of Q4_0 is not in whole blocks of 32"): {
                "a tensor in less than a block": record("tensor", 1, type_id=2, type_name=b"Q4_0"),
            },
            (f"record: {NORM}", "it has no elements, and 16 bytes"): {
                "a tensor without elements, but a length": record("tensor", 1, ne0=0),
                "a length without elements, of an unknown type": record(
                    "tensor", 1, ne0=0, flags=1, type_name=b"type-0"
                ),
            },
            (f"record: {NORM}", "it has 4 elements, and 0 bytes"): {
                "a tensor with elements, but without a length": of_no_length,
            },
            ("manifest: in manifest.json", "hotness.measured_blob_count is 3, the index has 4"): {
                "another count of measured blobs": stated(hotness={"measured_blob_count": 3}),
            },
            ("manifest: in manifest.json", 'hotness.blob_count is "4", the index has 4'): {
                "a count of blobs that is no number": stated(hotness={"blob_count": "4"}),
            },
            ("digest: tensor token_embd.weight", "its SHA-256 is"): {
                "a strong digest of a tensor": strong_digests(other=12),
            },
            ("digest: in dense.bin", "its SHA-256 is"): {
                "a strong digest of a header": strong_digests(other=-1),
            },
            ("manifest: in manifest.json", "the SHA-256 of index.bin is"): {
                "a strong digest of the index": strong_index,
            },
        }
    ),
]
INDEX_RULES = {
    "header": HEADER_RULES,
    "section": SECTION_RULES,
    "file": FILE_RULES,
    "family": FAMILY_RULES,
    "kind": KIND_RULES,
    "record": RECORD_RULES,
    "slice": SLICE_RULES,
    "dense": DENSE_RULES,
    "cross": CROSS_RULES,
}
