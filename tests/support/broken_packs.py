"""Every rule of the pack's format, broken alone: what a reader says of it, and where."""

from functools import partial

from moepack.format import records
from tests.support.pack_draft import (
    Draft,
    Piece,
    Rule,
    added,
    all_of,
    codec_twice,
    counted,
    cut_to,
    dirty_gap,
    fewer,
    header,
    longer_file,
    more,
    moved,
    own_tensors,
    pushed,
    ranked,
    record,
    renamed,
    resized,
    second_places,
    section,
    set_rank,
    shifted,
    stated,
    strong_digests,
    swapped_files,
    swapped_sections,
    with_codecs,
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


def name_rules(kind: str, number: int, field: str, place: str, length: int) -> list[Rule]:
    """Return the rules of a name in a record; `length` is what it is padded to."""
    rules = [
        Rule(f"{field}: {what}", record(kind, number, **{field: name}), place, problem)
        for what, (name, problem) in NAME_PROBLEMS.items()
    ]
    full = record(kind, number, **{field: b"n" * length})
    return [*rules, Rule(f"{field}: too long", full, place, "a name is not padded with zeros")]


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
    Rule("a long header", header(header_length=65536), "directory", "longer than the index"),
    Rule("many sections", header(section_count=256), "directory", "longer than the index"),
    Rule(
        "a directory that ends too far in",
        lambda draft: draft.rebuild(draft.pieces(), header_more=bytes(65536 - 56)),
        "directory",
        "ends too far in",
    ),
    Rule(
        "an index of more than 1 GiB",
        header(index_length=(1 << 30) + 8),
        "index_length",
        "out of bounds",
    ),
    Rule("a longer index", resized(64, stated=False), "index_length", "wrong length"),
    Rule("a shorter index", resized(-64, stated=False), "index_length", "wrong length"),
    *(
        Rule(f"{name} of {n:,}", header(**{name: n}), name, "not an alignment")
        for name in ("blob_alignment", "part_alignment", "tensor_alignment")
        for n in (0, 3, 4097, 1 << 31, 1 << 63)
    ),
    Rule("parts above blobs", header(part_alignment=8192), "part_alignment", "above the blobs'"),
]
KNOWN = ("files", "families", "part_kinds", "blobs", "parts", "ranks", "tensors", "shard_bytes")
NEEDED = KNOWN[:6]
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
NEW = Piece(b"news", b"12345678" * 9, 8, 0)
SECTION_RULES = [
    Rule(
        "a longer index, stated",
        resized(64, stated=True),
        "index_length",
        "does not fit the sections",
    ),
    Rule(
        "a shorter index, stated",
        resized(-8, stated=True),
        "index_length",
        "does not fit the sections",
    ),
    *(Rule(f"no {name}", without(name), name, "the section is missing") for name in NEEDED),
    Rule("a section twice", added(NEW, NEW), "news", "the section stands twice"),
    Rule("blobs twice", section("parts", name=b"blobs"), "blobs", "the section stands twice"),
    *name_rules("section", 6, "name", "section 6", 24),
    *(
        Rule(f"flags of {flags:#x}", section("tensors", flags=flags), "tensors", "unknown flags")
        for flags in (2, 3, 1 << 31)
    ),
    Rule("a flag of a new section", added(NEW._replace(flags=2)), "news", "unknown flags"),
    Rule(
        "a new section that is required",
        added(NEW._replace(flags=1)),
        "directory",
        "needs the section 'news', which this reader does not know",
    ),
    Rule(
        "an empty section that is required",
        added(Piece(b"signs", b"", 8, 1)),
        "directory",
        "needs the section 'signs', which this reader does not know",
    ),
    Rule(
        "families first",
        swapped_sections,
        "directory",
        "does not begin with files, families and part_kinds",
    ),
    Rule("codecs that may be ignored", with_codecs(flags=0), "codecs", "not flagged as required"),
    Rule("a codec alone", with_codecs(count=0), "stored_digests", "the section is missing"),
    Rule(
        "a stored digest too few", with_codecs(count=11), "stored_digests", "not one for each part"
    ),
    Rule(
        "a codec that nobody knows",
        with_codecs(b"org.example.packer"),
        "codec 0",
        "needs the codec 'org.example.packer', which this reader does not know",
    ),
    Rule("a codec twice", codec_twice, "codec 1", "another codec has the same name"),
    *(
        Rule(f"a codec: {what}", with_codecs(name), "codec 0", problem)
        for what, (name, problem) in NAME_PROBLEMS.items()
    ),
    Rule("a codec: too long", with_codecs(b"n" * 32), "codec 0", "a name is not padded with zeros"),
    Rule(
        "a second place too few",
        added(Piece(b"second_places", bytes(16 * 11), 16, 0)),
        "second_places",
        "not one for each part",
    ),
    Rule(
        "a strong digest too few",
        added(Piece(b"strong_digests", bytes(32 * 12), 32, 0)),
        "strong_digests",
        "not one for each part, tensor and shard bytes",
    ),
    *(
        Rule(
            f"records of {n:,} bytes",
            all_of(added(NEW), section("news", record_length=n)),
            "news",
            "record length out of bounds",
        )
        for n in (0, 65537, (1 << 32) - 1)
    ),
    *(
        Rule(f"{name}, short records", section(name, record_length=n), name, "wrong record length")
        for name, n in {
            **{"files": 264, "families": 56, "part_kinds": 144, "blobs": 24, "parts": 24},
            **{"ranks": 2, "tensors": 368, "shard_bytes": 32},
        }.items()
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
        Rule(
            f"{name} moved by {step}",
            pushed(name, step),
            name,
            "not where the section before it ends",
        )
        for name in KNOWN
        for step in (64, -64, 8)
    ),
    *(
        Rule(
            f"{name} nowhere",
            section(name, offset=at),
            name,
            "not where the section before it ends",
        )
        for name, at in {"blobs": (1 << 64) - 64, "parts": 0}.items()
    ),
    *(
        Rule(f"{name} past the end", counted(name, 65536), name, "ends past the index")
        for name in ("blobs", "parts", "ranks", "tensors", "shard_bytes")
    ),
    Rule(
        "a new section of 2^64 records",
        all_of(added(NEW), counted("news", BIG)),
        "news",
        "ends past the index",
    ),
    *(
        Rule(f"bytes before {what}", dirty_gap(what), what, "bytes before it are not zero")
        for what in ("files", "families", "the trailer")
    ),
    *(
        Rule(f"{name} without a rank", change("ranks"), "ranks", "not one for each blob")
        for name, change in {"a blob": fewer, "no blob": more}.items()
    ),
]
FILE_RULES = [
    *(
        Rule(f"a name {what}", renamed(name), "file 1", "not a plain file name")
        for what, name in BAD_NAMES.items()
    ),
    Rule("no name", record("file", 0, name=b""), "file 0", "an empty name"),
    Rule(
        "a name of 256 bytes",
        record("file", 0, name=b"n" * 256),
        "file 0",
        "a name is not padded with zeros",
    ),
    Rule(
        "bytes after a name",
        record("file", 0, name=b"a\0b"),
        "file 0",
        "a name is not padded with zeros",
    ),
    Rule("a name not in UTF-8", record("file", 0, name=b"\xff"), "file 0", "a name is not UTF-8"),
    Rule("a name twice", renamed("experts-00000.bin"), "files", "two files have the same name"),
    Rule(
        "a name twice, loud", renamed("Experts-00000.BIN"), "files", "two files have the same name"
    ),
    *(
        Rule(f"kind {n}", record("file", 0, kind=n), "file 0", "unknown kind of file")
        for n in (3, (1 << 32) - 1)
    ),
    Rule(
        "second places first",
        record("file", 0, kind=2),
        "files",
        "a file of second places stands before another",
    ),
    *(
        Rule(f"flags {n}", record("file", 0, flags=n), "file 0", "unknown flags")
        for n in (2, 3, 1 << 31)
    ),
    *(
        Rule(f"a length of {n:,}", record("file", 0, length=n), "file 0", "length out of bounds")
        for n in (0, 1 << 63, BIG)
    ),
]
FAMILY_RULES = [
    *(
        Rule(
            f"{field} of {n:,}",
            record("family", 0, **{field: n}),
            f"family 0: {field}",
            "out of bounds",
        )
        for field, numbers in {
            "expert_count": (0, 65537, (1 << 32) - 1),
            "parts_per_blob": (0, 65, (1 << 32) - 1),
        }.items()
        for n in numbers
    ),
    Rule("a layer of 65,536", record("family", 1, layer=65536), "family 1: layer", "out of bounds"),
    Rule(
        "more parts than there are",
        record("family", 1, parts_per_blob=4),
        "family 1",
        "more part kinds than the index holds",
    ),
    *(
        Rule(name, change, section, "the families' records do not add up to the section's count")
        for name, change, section in (
            ("an expert too many", record("family", 1, expert_count=3), "blobs"),
            ("an expert too few", record("family", 1, expert_count=1), "blobs"),
            ("a blob of no family", all_of(more("blobs"), more("ranks")), "blobs"),
            ("a blob too few", all_of(fewer("blobs"), fewer("ranks")), "blobs"),
            ("a part kind of no family", more("part_kinds"), "part_kinds"),
            ("a part of no family", more("parts"), "parts"),
            ("a part too few", fewer("parts"), "parts"),
        )
    ),
    *(
        Rule(
            f"{field} of {n:,}",
            record("family", 1, **{field: n}),
            f"family 1: {field}",
            "not the next record",
        )
        for field, numbers in {
            "first_blob": (0, 1, (1 << 32) - 1),
            "first_part_kind": (0, 4, (1 << 32) - 1),
            "first_part": (0, 1, 1 << 63),
        }.items()
        for n in numbers
    ),
    *(
        Rule(f"flags {n}", record("family", 0, flags=n), "family 0", "unknown flags")
        for n in (2, 3, 1 << 31)
    ),
    Rule(
        "layers in another order",
        record("family", 0, layer=2),
        "families",
        "not in the order of their layers",
    ),
    Rule(
        "a family twice",
        record("family", 1, layer=0),
        "families",
        "two families have the same layer and name",
    ),
    *name_rules("family", 1, "name", "family 1", 32),
]
FIRST_KIND = "family 0: part 0"
KIND_RULES = [
    *(
        Rule(
            f"{n:,} dimensions",
            record("part_kind", 0, dimension_count=n),
            FIRST_KIND,
            "dimension_count out of bounds",
        )
        for n in (3, (1 << 32) - 1)
    ),
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
    *(
        Rule(
            f"a length of {n}", record("part_kind", 0, length=n), FIRST_KIND, "length out of bounds"
        )
        for n in (0, 1 << 63, BIG)
    ),
    *(
        Rule(f"flags {n}", record("part_kind", 0, flags=n), FIRST_KIND, "unknown flags")
        for n in (4, 1 << 31)
    ),
    *name_rules("part_kind", 0, "name", FIRST_KIND, 64),
    *name_rules("part_kind", 5, "type_name", "family 1: part 2", 24),
    Rule(
        "a name twice",
        record("part_kind", 1, name=b"ffn_gate_exps.weight"),
        "family 0",
        "two parts have the same name",
    ),
    *(
        Rule(f"shard {n:,}", record("part_kind", 0, shard=n), FIRST_KIND, "shard out of bounds")
        for n in (4096, (1 << 32) - 1)
    ),
    *(
        Rule(f"an origin {what}", change, FIRST_KIND, "its origin is of two kinds, or of none")
        for what, change in {
            "without a stride": record("part_kind", 0, stride=0),
            "of both kinds": record("part_kind", 0, first_slice=1),
            "with both": record("part_kind", 0, flags=2),
            "with a shard as well": all_of(own_tensors(), record("part_kind", 0, shard=1)),
        }.items()
    ),
    *(
        Rule(
            f"slices that end at {what}",
            record("part_kind", 0, **fields),
            FIRST_KIND,
            "end of its slices out of bounds",
        )
        for what, fields in {
            "2^64": {"shard_offset": BIG - 63},
            "2^63": {"shard_offset": (1 << 63) - 64},
            "more": {"stride": BIG},
        }.items()
    ),
]
PAST = "ends past the end of experts-00000.bin"
RECORD_RULES = [
    Rule("a blob in no file", record("blob", 1, file=3), "blob 1", "no such file"),
    Rule("a blob past the end", moved("blob", 1, offset=1 << 20), "blob 1", PAST),
    Rule("a blob at 2^64-4096", record("blob", 1, offset=(1 << 64) - 4096), "blob 1", PAST),
    Rule("a blob too long", moved("blob", 1, length=1 << 20), "blob 1", PAST),
    Rule("a blob of 2^64-4096", record("blob", 0, length=(1 << 64) - 4096), "blob 0", PAST),
    Rule(
        "a blob unaligned",
        shifted("blob", 0, offset=1 / 8, length=-1),
        "blob 0",
        "offset not aligned",
    ),
    Rule("an uneven blob", moved("blob", 0, length=-1), "blob 0", "length not aligned"),
    Rule("a blob in a shard", record("file", 0, kind=1), "blob 0", "a blob in a shard"),
    Rule(
        "a blob in a file of second places",
        all_of(second_places, record("blob", 0, file=3)),
        "blob 0",
        "a blob in a file of second places",
    ),
    *(
        Rule(f"no length, but {what}", change, "blob 1", "no length, yet a place")
        for what, change in {
            "an offset": record("blob", 1, offset=4096, length=0),
            "a file": record("blob", 1, offset=0, length=0, file=1),
        }.items()
    ),
    Rule("no such rank", record("blob", 0, rank=4), "blob 0", "no such rank"),
    Rule(
        "no such rank, and no blob", record("blob", 0, length=0, rank=4), "blob 0", "no such rank"
    ),
    Rule("a part in no file", record("part", 7, file=3), "part 7 (", "no such file"),
    Rule("a part with a codec", record("part", 7, codec=1), "part 7 (", "unknown codec"),
    *(
        Rule(
            f"a part stored in {n:,} bytes",
            record("part", 7, stored_length=n),
            "part 7 (",
            "stored_length is not the part's length",
        )
        for n in (0, 31, 33, BIG)
    ),
    *(
        Rule(
            f"a part at {at:,}",
            record("part", 7, offset=at),
            "part 7 (",
            "ends past the end of experts-00001.bin",
        )
        for at in (1 << 40, BIG - 31, BIG)
    ),
    *(
        Rule(f"a part {what}", change, "layer 0 expert", "a part lies outside its blob")
        for what, change in {
            "in another file": record("part", 0, file=1),
            "before its blob": record("part", 0, offset=0),
            "after its blob": shifted("part", 3, offset=3),
        }.items()
    ),
    Rule(
        "a part without a blob, in a data file",
        lambda draft: without_blobs(draft, kind=records.DATA_FILE),
        "layer 0 expert 0",
        "a part of an expert without a blob lies in no shard",
    ),
    Rule(
        "a codec in a shard",
        all_of(with_codecs(), without_blobs, record("part", 0, codec=1)),
        "part 0 (",
        "a codec in a shard",
    ),
    *(
        Rule(
            f"a part of 32 bytes stored in {n:,} by a codec",
            all_of(with_codecs(), record("part", 7, codec=1, stored_length=n)),
            "part 7 (",
            "stored_length does not shorten the part",
        )
        for n in (0, 33, BIG)
    ),
    Rule(
        "a part of 32 bytes stored in 32 by a codec",
        all_of(with_codecs(), record("part", 7, codec=1)),
        "part 7 (",
        "stored_length does not shorten the part",
    ),
    *(
        Rule(f"a second place {what}", change, "second place 0", problem)
        for what, change, problem in (
            ("in a data file", partial(second_places, file=1), "not in a file of second places"),
            ("in no file", partial(second_places, file=5), "not in a file of second places"),
            ("unaligned", partial(second_places, offset=8), "offset not aligned"),
            (
                "past the end",
                partial(second_places, offset=1 << 20),
                "ends past the end of second.bin",
            ),
            (
                "at 2^64",
                partial(second_places, offset=(1 << 64) - 4096),
                "ends past the end of second.bin",
            ),
        )
    ),
    Rule("a rank of no blob", ranked(0, 4), "rank 0", "no such blob"),
    Rule("a rank of 2^32-1", ranked(3, 0xFFFFFFFF), "rank 3", "no such blob"),
]
SLICE_RULES = [
    *(
        Rule(
            f"{n} slices for two experts",
            own_tensors(n),
            f"layer 0 expert {n}",
            "no such record in slices",
        )
        for n in (0, 1)
    ),
    Rule(
        "a first slice beyond",
        all_of(own_tensors(), record("part_kind", 0, first_slice=(1 << 32) - 1)),
        "layer 0 expert 0",
        "no such record in slices",
    ),
    Rule("a shard beyond", own_tensors(shard=4096), "slices 0", "shard out of bounds"),
    Rule(
        "a slice at 2^63",
        all_of(own_tensors(), record("slice", 0, shard_offset=1 << 63)),
        "slices 0",
        "shard_offset out of bounds",
    ),
]
TENSOR = "tensor 1 (blk.0.attn_norm.weight)"
DENSE_RULES = [
    *(
        Rule(f"a tensor {what}", record("tensor", 1, name=name), "tensor 1", problem)
        for what, (name, problem) in list(NAME_PROBLEMS.items())[:3]
    ),
    Rule(
        "a long name",
        record("tensor", 1, name=b"n" * 256),
        "tensor 1",
        "a name is not padded with zeros",
    ),
    *name_rules("tensor", 1, "type_name", TENSOR, 24),
    Rule(
        "a tensor twice",
        record("tensor", 1, name=b"token_embd.weight"),
        "tensor 1 (token_embd.weight)",
        "another tensor has the same name",
    ),
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
            ("past the end", {"offset": 1 << 30}, "ends past the end of dense.bin"),
            ("at 2^64", {"offset": BIG}, "ends past the end of dense.bin"),
            ("unaligned", {"offset": 8}, "offset not aligned"),
            ("no shard", {"shard": 4096}, "shard out of bounds"),
            ("2^63 in its shard", {"shard_offset": (1 << 63) - 8}, "shard_offset out of bounds"),
        )
    ),
    Rule(
        "a tensor in a file of second places",
        all_of(second_places, record("tensor", 1, file=3)),
        TENSOR,
        "in a file of second places",
    ),
    Rule(
        "a header in a file of second places",
        all_of(second_places, record("shard_bytes", 0, file=3, offset=0, length=8)),
        "shard_bytes 0",
        "in a file of second places",
    ),
    *(
        Rule(f"shard bytes: {what}", record("shard_bytes", 0, **fields), "shard_bytes 0", problem)
        for what, fields, problem in (
            ("none", {"length": 0}, "length out of bounds"),
            ("no file", {"file": 3}, "no such file"),
            ("past the end", {"offset": 1 << 30}, "ends past the end of dense.bin"),
            ("of 2^64", {"length": BIG}, "ends past the end of dense.bin"),
            ("unaligned", {"offset": 8}, "offset not aligned"),
            ("no shard", {"shard": 4096}, "shard out of bounds"),
            ("2^63 in its shard", {"shard_offset": (1 << 63) - 8}, "shard_offset out of bounds"),
        )
    ),
]
CROSS_RULES = [
    Rule(
        "another length than in the manifest",
        longer_file,
        "files",
        "index and manifest list other files",
    ),
    Rule(
        "another order than in the manifest",
        swapped_files,
        "files",
        "index and manifest list other files",
    ),
    Rule(
        "a name in the index alone",
        renamed("x.bin"),
        "files",
        "index and manifest list other files",
    ),
    Rule(
        "not whole",
        stated(whole=False),
        "whole",
        "index and manifest differ on whether the pack is whole",
    ),
    Rule(
        "whole without a dense part",
        without("tensors"),
        "whole",
        "index and manifest differ on whether the pack is whole",
    ),
    Rule(
        "whole, with layers chosen",
        stated(layers=[0, 1]),
        "whole",
        "index and manifest differ on whether the pack is whole",
    ),
    *(
        Rule(
            f"layers {layers}",
            stated(whole=False, layers=layers),
            "layers",
            "index and manifest list other layers",
        )
        for layers in ([], [0], [0, 1, 2], [1, 0])
    ),
]
SHARD_RULES = [
    *(
        Rule(name, change, place, "came from a shard that the manifest does not name")
        for name, change, place in (
            ("slices of no shard", record("part_kind", 0, shard=1), "layer 0 expert 0"),
            ("a tensor of no shard", record("tensor", 1, shard=1), "tensor blk.0.attn_norm.weight"),
            (
                "a header of no shard",
                all_of(more("shard_bytes"), record("shard_bytes", 1, shard=1)),
                "header",
            ),
            (
                "padding of no shard",
                all_of(more("shard_bytes"), record("shard_bytes", 1, shard=1, shard_offset=512)),
                "padding at byte 512",
            ),
        )
    ),
    *(
        Rule(f"no header: {what}", change, "m.gguf", "the header of a shard is missing")
        for what, change in {
            "none": fewer("shard_bytes"),
            "shorter": moved("shard_bytes", 0, length=-32),
            "elsewhere": record("shard_bytes", 0, shard_offset=32),
        }.items()
    ),
    Rule(
        "slices over each other",
        moved("part_kind", 0, stride=-8),
        "layer 0 expert 1",
        "overlaps another",
    ),
    Rule("a header twice", more("shard_bytes"), "header", "overlaps another"),
    Rule("a tensor twice there", moved("tensor", 2, shard_offset=-8), "tensor", "overlaps another"),
    Rule(
        "a tensor past its shard",
        record("tensor", 1, shard_offset=1 << 40),
        TENSOR.replace("1 (", "").rstrip(")"),
        "ends past its shard",
    ),
]
"""What only those find who put the shards together again."""


def shifted_weight(draft: Draft) -> None:
    """Move the last part of expert 1, bytes and all, to where no weight may begin."""
    step = draft.header.blob_alignment // 8
    part = draft.get("part", 5)
    path = draft.path / "experts-00000.bin"
    data = bytearray(path.read_bytes())
    held = data[part.offset : part.offset + part.stored_length]
    data[part.offset : part.offset + len(held)] = bytes(len(held))
    data[part.offset + step : part.offset + step + len(held)] = held
    path.write_bytes(data)
    draft.set("part", 5, offset=part.offset + step)


def swapped_parts(draft: Draft) -> None:
    """Let two parts of expert 1 change places, bytes and all."""
    path = draft.path / "experts-00000.bin"
    data = bytearray(path.read_bytes())
    one, two = draft.get("part", 3), draft.get("part", 4)
    length = one.stored_length
    held = [bytes(data[part.offset : part.offset + length]) for part in (one, two)]
    for number, part, moved_bytes in ((3, two, held[0]), (4, one, held[1])):
        data[part.offset : part.offset + length] = moved_bytes
        draft.set("part", number, offset=part.offset)
    path.write_bytes(data)


def uneven_file(draft: Draft, number: int = 1) -> None:
    draft.lengthen(number, bytes(8))


def overlapping_tensors(draft: Draft) -> None:
    """Let the last tensor begin where the one before it does, with its bytes."""
    path = draft.path / "dense.bin"
    data = bytearray(path.read_bytes())
    one, two = draft.get("tensor", 1), draft.get("tensor", 2)
    assert one.length == two.length
    data[two.offset : two.offset + two.length] = bytes(two.length)
    path.write_bytes(data)
    draft.set("tensor", 2, offset=one.offset, digest=one.digest)


def more_experts_used(draft: Draft) -> None:
    draft.body["source"]["experts_used"] = {"ffn_exps": [2, 3]}


def other_page(draft: Draft) -> None:
    draft.body["index"]["pages"]["digests"][0] = "xxh3:" + "0" * 16


def strong_index(draft: Draft) -> None:
    draft.body["index"]["sha256"] = "0" * 64


def overlapping_second_places(draft: Draft) -> None:
    """Let two parts have the same bytes, and the same second place."""
    first, second = draft.get("part", 0), draft.get("part", 1)
    path = draft.path / "experts-00000.bin"
    data = bytearray(path.read_bytes())
    held = data[first.offset : first.offset + first.stored_length]
    data[second.offset : second.offset + second.stored_length] = held
    path.write_bytes(data)
    draft.set("part", 1, digest=first.digest)
    second_places(draft)
    at = draft.sections["second_places"].offset
    draft.index[at + 16 : at + 32] = draft.index[at : at + 16]


def other_second_place(draft: Draft) -> None:
    second_places(draft)
    path = draft.path / "second.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


# A reader relies on none of these; the verifier finds them. `place` is what its finding names.
VERIFIERS_RULES = [
    Rule("blobs overlap", shifted("blob", 1, length=1), "layer 0", "the blob overlaps another"),
    Rule("parts in another order", swapped_parts, "layer 0", "the part before it"),
    Rule("a weight unaligned", shifted_weight, "layer 0", "is not aligned to"),
    Rule("a file's end unaligned", uneven_file, "experts-00001.bin", "its length is not aligned"),
    Rule(
        "the end of a file of tensors unaligned",
        partial(uneven_file, number=2),
        "dense.bin",
        "its length is not aligned",
    ),
    Rule(
        "a rank twice",
        lambda d: set_rank(d, 1, d.index[d.sections["ranks"].offset]),
        "rank",
        "its record says",
    ),
    Rule("ranks that differ", record("blob", 0, rank=3), "rank", "its record says 3"),
    Rule(
        "hotness that rises",
        record("blob", 3, hotness=100),
        "rank",
        "is hotter than the one before it",
    ),
    Rule("a part's digest", record("part", 4, digest=1), "layer 0 expert 1", "its digest is"),
    Rule("a tensor over another", overlapping_tensors, "dense.bin", "the tensor overlaps another"),
    Rule(
        "a type of another name",
        record("part_kind", 0, type_name=b"F16"),
        "layer 0",
        "type 0 is F32, the record says F16",
    ),
    Rule(
        "a type of another length",
        record("part_kind", 0, ne1=3),
        "layer 0",
        "4 x 3 of F32 is 48 bytes long, the record says 32",
    ),
    Rule(
        "rows interleaved that are not",
        record("part_kind", 0, interleaved_row_count=4),
        "layer 0",
        "F32 interleaves no rows",
    ),
    Rule(
        "a part in less than a block",
        record("part_kind", 0, type_id=2, type_name=b"Q4_0"),
        "layer 0",
        "4 x 2 of Q4_0 is not in whole blocks of 32",
    ),
    Rule(
        "a tensor of a type of another name",
        record("tensor", 1, type_name=b"F16"),
        "blk.0.attn_norm.weight",
        "type 0 is F32, the record says F16",
    ),
    Rule(
        "a tensor in less than a block",
        record("tensor", 1, type_id=2, type_name=b"Q4_0"),
        "blk.0.attn_norm.weight",
        "4 of Q4_0 is not in whole blocks of 32",
    ),
    Rule(
        "a tensor without elements, but a length",
        record("tensor", 1, ne0=0),
        "blk.0.attn_norm.weight",
        "it has no elements, and 16 bytes",
    ),
    Rule(
        "more experts used than there are", more_experts_used, "manifest", "a token uses 3 experts"
    ),
    Rule("no hotness stated", stated(hotness=None), "manifest", "it knows of no hotness"),
    Rule(
        "another count of measured blobs",
        stated(hotness={"measured_blob_count": 3}),
        "manifest",
        "hotness.measured_blob_count is 3, the index has 4",
    ),
    Rule(
        "a count of blobs that is no number",
        stated(hotness={"blob_count": "4"}),
        "manifest",
        'hotness.blob_count is "4", the index has 4',
    ),
    Rule("a page's digest", other_page, "page 0", "does not have the digest"),
    Rule("a strong digest", strong_digests(other=5), "layer 0 expert 1", "its SHA-256 is"),
    Rule(
        "a strong digest of a tensor",
        strong_digests(other=12),
        "token_embd.weight",
        "its SHA-256 is",
    ),
    Rule("a strong digest of a header", strong_digests(other=-1), "dense.bin", "its SHA-256 is"),
    Rule("a strong digest of the index", strong_index, "manifest", "the SHA-256 of index.bin is"),
    Rule(
        "second places over each other",
        overlapping_second_places,
        "second.bin",
        "the part overlaps another",
    ),
    Rule("a second place of other bytes", other_second_place, "second.bin", "its digest is"),
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
