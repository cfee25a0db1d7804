"""layouts/FORMAT.md tells the truth: records, types, limits, digests, messages and the example."""

import re
import struct
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

import moepack
from moepack.common import digest
from moepack.common.errors import PackError
from moepack.pack.format import manifest, records
from moepack.pack.verifying.block_sizes import BLOCK_SIZES
from moepack.packing.plan import layout
from moepack.source.experts import FAMILIES
from moepack.source.ggml_types import TYPES
from tests.support.broken_packs import INDEX_RULES, SHARD_RULES
from tests.support.messages import MESSAGES, documented
from tests.support.pack_draft import KINDS, Draft
from tests.support.worked_example import example

__all__ = ["example"]

ROOT = Path(__file__).parent.parent
FORMAT = (ROOT / "layouts" / "FORMAT.md").read_text()
RECORDS: dict[str, tuple[struct.Struct, Any]] = {
    **{kind.replace("_", " ").capitalize(): (form, row) for kind, (_, form, row) in KINDS.items()},
}


def section(heading: str) -> str:
    """Return the text below a heading, up to the next one of its level or a higher one."""
    start = FORMAT.index(f"\n{heading}\n") + len(heading) + 2
    level = heading.index(" ")
    end = re.search(rf"^#{{1,{level}}} ", FORMAT[start:], re.MULTILINE)
    return FORMAT[start : start + end.start() if end else None]


def rows(text: str) -> list[list[str]]:
    """List the cells of the tables in a text, without their heads."""
    cells = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        cells += [line.strip("|").split("|") for line in block.splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in cells]


# Sections.


def test_what_readers_do_not_need_is_marked_and_comes_last() -> None:
    """How a part is found comes right behind the terms."""
    headings = re.findall(r"^## (.+)$", FORMAT, re.MULTILINE)
    assert headings[:2] == ["Terms", "Finding a part"]
    later = headings.index("Worked example") + 1
    marked = [name for name in headings if section(f"## {name}").startswith("\n*Not for readers")]
    assert marked == headings[later:-1]
    assert {"Writing: order of events", "Layouts", "Messages", "GGML types"} <= set(marked)
    assert FORMAT[: FORMAT.index("\n## Types\n")].count("\n") < 680


# Records, types, limits, digests.


@pytest.mark.parametrize("name", RECORDS)
def test_each_record_has_the_bytes_of_its_table(name: str) -> None:
    form, record = RECORDS[name]
    table = [row for row in rows(section(f"### {name}")) if row[0].isdigit()]
    fields, codes, end = [], "<", 0
    for at, kind, field, _ in table:
        assert int(at) == end, field
        length = {"u32": 4, "u64": 8}.get(kind) or int(kind.removesuffix(" bytes"))
        codes += {"u32": "I", "u64": "Q"}.get(kind) or f"{length}s"
        fields.append(field.strip("`"))
        end += length
    assert tuple(fields) == record._fields
    assert end == form.size
    data = bytes(n % 256 for n in range(end))
    assert struct.unpack(codes, data) == form.unpack(data)


def test_the_sections_are_those_that_the_index_has() -> None:
    table = [
        row for row in rows(section("### Section")) if row[0].startswith("`") and row[2].isdigit()
    ]
    assert {row[0].strip("`"): int(row[2]) for row in table} == records.RECORD_LENGTHS
    for name, _, _, count, when in table:
        bounds = re.fullmatch(r"([\d,]+) to ([\d,]+)", count.strip("`"))
        assert bounds or count.startswith("as many as ")
        if bounds:
            least, most = (int(text.replace(",", "")) for text in bounds.groups())
            assert (least, most) == records.COUNTS[name.strip("`")]
        assert (when == "always") == (name.strip("`") in records.REQUIRED_SECTIONS)


def test_the_types_are_those_of_packer_verifier_and_gguf_package() -> None:
    table = rows(section("## GGML types"))
    types = {}
    for number, name, *sizes in table:
        elements, length, meta, row_count, tail = (int(cell or 0) for cell in sizes)
        types[int(number)] = (name.strip("`"), elements, length, meta, row_count or 1, tail)
    assert types == {
        number: (
            *(kind.name, kind.block_count, kind.block_length, kind.row_meta_length),
            *(kind.interleaved_row_count, kind.tail_length),
        )
        for number, kind in TYPES.items()
    }
    assert types == {number: tuple(size) for number, size in BLOCK_SIZES.items()}
    assert [int(row[0]) for row in table] == sorted(TYPES)
    for kind, lengths in GGML_QUANT_SIZES.items():
        if kind != GGMLQuantizationType.Q8_1:  # wrong in gguf 0.19.0: it has 36 bytes in C
            assert types[kind.value][:3] == (kind.name, *lengths)


def test_the_limits_are_the_codes() -> None:
    limits = dict(rows(section("## Limits")))
    others = {
        "length of a file": "2^63 \N{MINUS SIGN} 1",
        "manifest": f"{manifest.MAX_LENGTH >> 20} MiB",
    }
    assert {name: limits.pop(name) for name in others} == others
    names = {
        "length of the index": "INDEX_LENGTH",
        "end of the directory in it": "DIRECTORY_END",
        "length of a record, of the header": "RECORD_LENGTH",
        "experts in a family": "EXPERTS",
        "parts in a blob": "PARTS_IN_BLOB",
        "tensors, shard bytes": "TENSORS",
    }
    codes = {name for name in vars(records) if name.startswith("MAX_")} - {"MAX_LENGTH"}
    assert {
        f"MAX_{names.get(name, name.upper().replace(' ', '_'))}": int(value.replace(",", ""))
        for name, value in limits.items()
    } == {name: getattr(records, name) for name in codes}


def test_the_vectors_of_the_digest_are_right() -> None:
    vectors = {int(length.replace(",", "")): text for length, text in rows(section("## Digests"))}
    assert {0, 4, 16, 128, 240, 1025, 100_000} <= set(vectors)
    for length, text in vectors.items():
        data = bytes(n % 256 for n in range(length))
        assert text.strip("`") == digest.to_text(digest.xxh3(data))


def test_the_families_are_those_that_are_packed() -> None:
    families = [row for row in rows(section("## Names")) if len(row) == 2]
    assert [name.strip("`") for name, _ in families] == list(FAMILIES)


# The manifest and layouts.


def test_the_manifest_ends_in_the_bytes_that_are_stated(example: Path) -> None:
    match = re.search(
        r"last (\d+) bytes of the file\*\* are exactly `(.+?)`, 16 digits and `(.+?)`;", FORMAT
    )
    assert match
    before, after = (text.encode().decode("unicode_escape").encode() for text in match.groups()[1:])
    data = (example / "manifest.json").read_bytes()
    end = data[-int(match[1]) :]
    assert (end.startswith(before), end.endswith(after)) == (True, True)
    assert len(end) == len(before) + 16 + len(after)
    assert end[len(before) :][:16].decode() == f"{digest.xxh3(data[: -len(end)]):016x}"


def test_the_keys_of_the_manifest_are_those_that_are_written(example: Path) -> None:
    listed = listed_keys()
    written = set(key_paths(Draft(example).body))
    free = re.compile(r"(layout|hotness|source\.experts_used)\.")
    asked_for = {"index.sha256", "signature"}
    assert {key for key in written if not free.match(key)} == set(listed) - asked_for


def test_the_keys_of_the_hotness_are_those_that_are_written(example: Path) -> None:
    named = {
        name
        for row in rows(section("## The manifest"))[len(listed_keys()) :]
        for name in re.findall(r"`(.+?)`", row[0])
    }
    hotness = set(key_paths(Draft(example).body["hotness"]))
    assert {key for key in hotness if "[]" not in key} == named


def listed_keys() -> list[str]:
    listed = [row[0].strip("`") for row in rows(section("## The manifest"))]
    return listed[: listed.index("manifest_digest") + 1]


def key_paths(value: object, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all keys, `[]` for the elements of a list."""
    if isinstance(value, list):
        for inner in value:
            yield from key_paths(inner, f"{prefix}[]")
    elif isinstance(value, dict):
        for key, inner in value.items():
            path = f"{prefix}.{key}".removeprefix(".")
            yield path
            yield from key_paths(inner, path)


def test_the_example_of_a_layout_is_the_shipped_one() -> None:
    text = section("## Layouts")
    code = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    ") or not line)
    written = code[code.index("description =") :]
    shipped = (ROOT / "layouts" / "hot-first.toml").read_text()
    assert tomllib.loads(written) == tomllib.loads(shipped)
    keys = {row[0].strip("`") for row in rows(text)}
    assert keys == {path for path in key_paths(tomllib.loads(shipped)) if "." in path} | {
        "description",
    }
    assert f"up to {layout.MAX_FILE_LENGTH >> 10} KiB" in text


# The worked example.


def test_the_hex_dump_of_the_worked_example_is_the_index(example: Path) -> None:
    data = (example / "index.bin").read_bytes()
    dump = re.findall(r"^    ([0-9a-f]{8}): ((?:[0-9a-f]{4} ){8}) (.{16})$", FORMAT, re.MULTILINE)
    assert len(dump) >= 14
    for at, line, text in dump:
        row = data[int(at, 16) : int(at, 16) + 16]
        assert bytes.fromhex(line) == row
        assert text == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)


def test_the_numbers_of_the_worked_example_are_true(example: Path) -> None:
    """Each row names an integer at an offset, or an offset that the rows before lead to."""
    data = (example / "index.bin").read_bytes()
    checked = 0
    for what, how, value in rows(section("## Worked example")):
        if match := re.match(r"(u32|u64) at (\d+)", how):
            form = {"u32": "<I", "u64": "<Q"}[match[1]]
            (number,) = struct.unpack_from(form, data, int(match[2]))
            expected = digest.from_text(value) if value.startswith("xxh3:") else int(value)
            assert number == expected, what
        else:
            start, count, length = map(int, re.findall(r"(\d+) \+ (\d+) × (\d+)", how)[-1])
            position = start + count * length
            if "rounded up" in how:
                position = -(-position // 64) * 64
            assert position == int(value), what
        checked += 1
    assert checked >= 28


def test_the_worked_example_is_where_the_library_finds_it(example: Path) -> None:
    values = {what: value for what, _, value in rows(section("## Worked example"))}
    with moepack.open(example) as pack:
        blob = pack.locate(1, 3)
        part = pack.locate(1, 3, "down")
        tensor = pack.locate_dense("blk.0.attn_k.weight")
        family = pack.index.families[1]
        origin = pack.index.origin(family, family.part_kinds[2], 3)
    assert (blob.offset, blob.length, blob.hotness, blob.rank) == (360448, 45056, 28, 15)
    assert (part.offset, part.path.name) == (385024, "experts-00001.bin")
    assert part.digest == digest.from_text(values["its digest"])
    assert (tensor.offset, tensor.path.name) == (221184, "dense.bin")
    assert origin == (4, int(values["expert 3's slice"]))


def test_the_trailer_is_the_digest_of_everything_before_it(example: Path) -> None:
    data = (example / "index.bin").read_bytes()
    assert struct.unpack("<Q", data[-8:])[0] == digest.xxh3(data[:-8])


# Messages.


def test_the_messages_of_the_index_are_those_of_its_rules() -> None:
    """Each is in the document, and none that no rule has."""
    rules = [rule for rules in (*INDEX_RULES.values(), SHARD_RULES) for rule in rules]
    errors = [PackError(rule.problem, place=rule.place) for rule in rules]
    assert all(documented(error) for error in errors)
    missing = [m for m in MESSAGES["index"] if not any(m.fits(error) for error in errors)]
    assert {message.problem for message in missing} == {  # tested with the manifest
        "the index is damaged or of another pack: its … digest differs",
        "the index is not as long as the manifest says",
    }
