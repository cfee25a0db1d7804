"""The C header reads what Python reads, refuses what Python refuses, and touches nothing else."""

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import moepack
from moepack import digest
from moepack.errors import PackError
from moepack.format import manifest, records
from moepack.packing.shard_index import index_model
from tests.support.broken_packs import (
    COUNTS,
    INDEX_RULES,
    TENSOR_RULES,
    VERIFIERS_RULES,
    Draft,
    Rule,
    both,
    kind,
    longer_file,
    moved,
    record,
    renamed,
    section,
    swapped_files,
    tensor,
    with_section,
)
from tests.support.c_compiler import SANITIZERS, compiled
from tests.support.gguf_builder import F32, Q8_0, add_experts, moe
from tests.support.grown_packs import NewSection, grow
from tests.support.hostile_input import mutate, random_edits
from tests.support.models import REAL_MODELS, first_shard, flip, pack_model

ROOT = Path(__file__).parents[2]
C_COMPILERS = ("cc", "gcc", "clang")
CXX_COMPILERS = ("c++", "g++", "clang++")


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the C test program once, with sanitizers."""
    target = tmp_path_factory.mktemp("c") / "reader_test"
    source = ROOT / "tests" / "c_header" / "reader_test.c"
    run = compiled("cc", "-std=c99", *SANITIZERS, source, "-o", target)
    assert run.returncode == 0, run.stderr
    return target


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack two layers of two experts, each of three parts of 32 bytes; read-only."""
    folder = tmp_path_factory.mktemp("small")
    model = moe((0, 1), 2, ne=(4, 2), type_id=F32, block=(1, 4)).write(folder / "m.gguf")
    pack_model([model], folder / "pack", counts=COUNTS)
    return folder / "pack"


@pytest.fixture(scope="session")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay an index over such a model, whose digests are known; read-only."""
    folder = tmp_path_factory.mktemp("apart")
    model = moe((0, 1), 2, ne=(4, 2), type_id=F32, block=(1, 4)).write(folder / "m.gguf")
    index_model(model, folder / "index", digests=True)
    return folder / "index"


class Verdict(NamedTuple):
    """What a reader says of a pack: what it found, and the error, with its code, if it refuses.

    `place` is what Python's error names apart.
    """

    found: list[str]
    refusal: str
    place: str = ""

    def agrees(self, other: "Verdict") -> bool:
        """Say whether both refuse, or both find the same."""
        return bool(self.refusal and other.refusal) or self == other


def c_says(program: Path, mode: str, packs: list[Path]) -> list[Verdict]:
    """Run the C program on packs; a sanitizer's report, or any other words, are a failure."""
    verdicts = []
    for start in range(0, len(packs), 4000):
        batch = packs[start : start + 4000]
        run = subprocess.run(
            [program, mode, *batch], capture_output=True, text=True, timeout=60, check=False
        )
        assert run.stderr == ""
        outputs = run.stdout.split("pack ")[1:]
        assert len(outputs) == len(batch)
        verdicts += [verdict_of(output) for output in outputs]
        assert run.returncode == any(verdict.refusal for verdict in verdicts[start:])
    return verdicts


def verdict_of(output: str) -> Verdict:
    _, *found, last = output.splitlines()
    assert last == "sound" or last.startswith("refused "), last
    assert last.isprintable()
    assert len(last) < 256 + 20
    return Verdict(found, last.removeprefix("refused ").removeprefix("sound"))


def python_says(path: Path, *, reads: bool = False) -> Verdict:
    """Look up all that a pack holds; of a refused one nothing is found."""
    try:
        with moepack.open(path) as pack:
            return Verdict(
                [*lookups(pack, reads=reads), *ranks(pack), *tensors(pack, reads=reads)], ""
            )
    except PackError as error:
        return Verdict([], str(error), error.place or "")


def lookups(pack: moepack.Pack, *, reads: bool) -> list[str]:
    lines = []
    with pack.reader() as reader:
        for family in pack.index.families:
            for expert in range(family.expert_count):
                whose = f"{family.layer} {family.name} {expert}"
                blob = pack.locate(family.layer, expert, family=family.name)
                where = f"{file_of(pack, blob.path)} {blob.offset} {blob.length}"
                lines.append(f"blob {whose} {where} {blob.rank} {blob.hotness}")
                for kind in family.part_kinds:
                    part = pack.locate(family.layer, expert, kind.name, family=family.name)
                    where = f"{file_of(pack, part.path)} {part.offset} {part.offset_in_blob}"
                    lines.append(
                        f"part {whose} {kind.name} {kind.type_name} {kind.type_id} {where} "
                        f"{part.stored_length} {part.length} {digest_text(part.digest)}"
                    )
                    if reads:
                        shard, offset = pack.index.origin(family, kind, expert)
                        lines.append(f"origin {shard} {offset}")
                        key = (family.layer, expert, kind.name)
                        found = digest.of(reader.read(*key, family=family.name))
                        lines.append(f"bytes {found:016x}")
    return lines


def file_of(pack: moepack.Pack, path: Path | None) -> int | None:
    """Return the number of a file."""
    return None if path is None else pack.file_paths.index(path)


def digest_text(known: int | None) -> str:
    return "None" if known is None else f"{known:016x}"


def experts_of(pack: moepack.Pack) -> list[tuple[int, str, int]]:
    return [
        (family.layer, family.name, expert)
        for family in pack.index.families
        for expert in range(family.expert_count)
    ]


def ranks(pack: moepack.Pack) -> list[str]:
    experts = experts_of(pack)
    numbers = [pack.index.blob_at_rank(rank) for rank in range(pack.index.blob_count)]
    by_rank = [experts[number] for number in numbers]
    return [f"rank {r} {layer} {name} {n}" for r, (layer, name, n) in enumerate(by_rank)]


def tensors(pack: moepack.Pack, *, reads: bool) -> list[str]:
    lines = []
    with pack.reader() as reader:
        for held in pack.index.tensors():
            axes = (*held.shape, 0, 0, 0, 0)[:4]
            known = held.digest if pack.index.files[held.file].has_digests else None
            fields = (
                *(held.name.encode().hex(), held.type_name, held.type_id, int(held.inferred)),
                *(len(held.shape), *axes, held.file, held.offset, held.length),
                *(digest_text(known), held.shard, held.shard_offset),
            )
            lines.append(f"tensor {' '.join(map(str, fields))}")
            if reads:
                lines.append(f"bytes {digest.of(reader.read_dense(held.name)):016x}")
    return lines


# Compiling.


@pytest.mark.parametrize("optimized", ["-O0", "-O2"])
@pytest.mark.parametrize("compiler", [*C_COMPILERS, *CXX_COMPILERS])
def test_the_header_compiles_without_a_warning(
    compiler: str, optimized: str, tmp_path: Path
) -> None:
    standard = ("-x", "c++", "-std=c++17") if "+" in compiler else ("-x", "c", "-std=c99")
    for name, text in {"one": "#define MOEPACK_IMPLEMENTATION\n", "two": ""}.items():
        main = "" if text else "int main(void) { return moepack_code_name(MOEPACK_OK)[0] != 'O'; }"
        (tmp_path / f"{name}.c").write_text(f'{text}#include "moepack.h"\n{main}\n')
    sources = (tmp_path / "one.c", tmp_path / "two.c")
    run = compiled(compiler, optimized, *standard, *sources, "-o", tmp_path / "program")
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    subprocess.run([tmp_path / "program"], check=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"), "little-endian"),
        (("-UO_CLOEXEC", "-D_POSIX_C_SOURCE=199309L", "-std=c99"), "POSIX 2008"),
    ],
)
def test_what_cannot_work_is_refused_by_the_compiler(
    flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    source = tmp_path / "one.c"
    source.write_text('#define MOEPACK_IMPLEMENTATION\n#include "moepack.h"\n')
    run = compiled("cc", "-std=c99", "-U_POSIX_C_SOURCE", *flags, "-fsyntax-only", source)
    assert run.returncode != 0
    assert words in run.stderr


# Sound packs.


@pytest.mark.parametrize("model", REAL_MODELS)
def test_every_part_of_a_real_model_is_the_same_in_c_and_python(
    model: str, packs: dict[str, Path], program: Path
) -> None:
    (found,) = c_says(program, "list", [packs[model]])
    assert found == python_says(packs[model], reads=True)
    assert found.refusal == ""


def test_the_order_from_hot_to_cold_is_that_of_python(small: Path, program: Path) -> None:
    (found,) = c_says(program, "check", [small])
    order = [line.split() for line in found.found if line.startswith("rank")]
    with moepack.open(small) as pack:
        assert [(int(row[2]), int(row[4])) for row in order] == pack.hottest(1 << 40)
    assert any(line.endswith(" 9") for line in found.found if line.startswith("blob"))


def test_families_of_one_layer_are_told_apart(tmp_path: Path, program: Path) -> None:
    builder = moe((0, 3), experts=8).put("qwen3moe.experts_per_group", "u32", 4)
    builder.put("qwen3moe.attention.value_expert_count", "u32", 3)
    for name in ("up", "down"):
        builder.tensor(f"blk.0.ffn_{name}_chexps.weight", (64, 64, 2), Q8_0, 68)
    builder.tensor("blk.0.attn_v_exps.weight", (64, 16, 3), Q8_0, 68)
    pack_model([builder.write(tmp_path / "m.gguf")], tmp_path / "pack")
    (found,) = c_says(program, "list", [tmp_path / "pack"])
    assert found == python_says(tmp_path / "pack", reads=True)
    assert "ffn_chexps" in str(found)


def test_layers_with_gaps_and_large_numbers_are_found(tmp_path: Path, program: Path) -> None:
    """They share a place in the reader's table."""
    model = moe((3, 19, 35, 36, 1059), 2).write(tmp_path / "m.gguf")
    pack_model([model], tmp_path / "pack")
    (found,) = c_says(program, "check", [tmp_path / "pack"])
    assert found == python_says(tmp_path / "pack")
    assert found.refusal == ""


def test_what_the_pack_does_not_hold_is_said_so(small: Path, program: Path) -> None:
    run = subprocess.run([program, "misuse", small], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "SYSTEM experts-00000.bin: cannot read: Bad file descriptor" in run.stdout
    assert "NO_SUCH index.bin: layer 0: ffn_exps has 2 experts, not number 2" in run.stdout
    assert "NO_SUCH index.bin: there are no experts in layer 4096" in run.stdout
    assert f"path {small / 'experts-00000.bin'}\n" in run.stdout


def test_a_call_that_fails_is_an_error_and_leaves_nothing_behind(
    small: Path, program: Path
) -> None:
    """Memory, a descriptor or a mapping that stayed would be noticed."""
    run = subprocess.run([program, "starve", small], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert [
        line.partition(" cannot ")[2].partition(":")[0] for line in run.stdout.splitlines()
    ] == [
        *("allocate memory", "find", "open", "prepare", "prepare", "map"),
        *("allocate memory", "allocate memory"),
    ]


# Broken packs.


def named_files(first: str, second: str) -> Callable[[Draft], None]:
    return both(record("file", 0, name=first.encode()), renamed(second))


def large_alignment(draft: Draft) -> None:
    draft.set("header", 0, blob_alignment=1 << 30)
    for number in range(2):
        longest_file(draft, number, 1 << 31)
    for number in range(4):
        draft.set("blob", number, offset=number % 2 << 30, length=1 << 30)
        for part in range(3 * number, 3 * number + 3):
            draft.set("part", part, offset=(number % 2 << 30) + 32 * part)


def longest_file(draft: Draft, number: int = 0, length: int = (1 << 63) - 1) -> None:
    draft.set("file", number, length=length)
    draft.body["files"][number]["length"] = length


def as_long_as_its_blob(draft: Draft) -> None:
    draft.set("part_kind", 0, length=12288)
    for part in (0, 3):
        draft.set("part", part, stored_length=12288)


def at_the_end(past: int) -> Callable[[Draft], None]:
    """Move a part to the end of its blob, or a little past it."""

    def change(draft: Draft) -> None:
        blob = draft.get("blob", 1)
        assert blob.offset == 0, "there is another blob behind it"
        draft.set("part", 3, offset=blob.length - 32 + past)

    return change


def blob_to_the_end(past: int) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        blob = draft.get("blob", 0)
        length = draft.get("file", 0).length - blob.offset + past
        draft.set("blob", 0, rank=0, length=length)

    return change


def second_family(draft: Draft, name: bytes) -> None:
    """Put both families into one layer; each part keeps a name of its own."""
    draft.set("family", 1, layer=0, name=name)
    for number in range(3, 6):
        draft.set("part_kind", number, name=b"%d.weight" % number)


def other_names(draft: Draft) -> None:
    for number, name in enumerate(("a" * 255, "con-.bin", "com10")):
        (draft.path / draft.body["files"][number]["name"]).rename(draft.path / name)
        draft.rename(number, name)


# Named by the words of the C reader: one check each, where a later one would refuse these as well.
MORE_RULES = [
    Rule("the index's name in capitals", renamed("INDEX.bin"), "no data file's"),
    Rule("the name of a manifest to be", renamed("manifest.json.tmp"), "no data file's"),
    *(Rule(f"a name with {c} first", renamed(f"{c}x.bin"), "no data file's") for c in ".-_"),
    *(Rule(f"a name with {c!r}", renamed(f"x{c}.bin"), f"0x{ord(c):02x}") for c in "/@:[`{,\x7f"),
    *(
        Rule(f"a device, {name}", renamed(name), "no data file's")
        for name in ("CON", "prn.x.y", "aUx", "nul.", "com9.bin", "lpt0", "lpt9..")
    ),
    Rule("a family of 32 bytes", record("family", 0, name=b"n" * 32), "family 0: name"),
    Rule("more behind a family", record("family", 0, name=b"a\0b"), "family 0: name"),
    Rule(
        "more at the end of a family", record("family", 0, name=b"a" + bytes(30) + b"b"), "byte 31"
    ),
    Rule("more behind a part", kind(0, name=b"a\0b"), "family 0: part 0: name"),
    Rule("more behind a type", kind(0, type_name=b"F\0" + b"3"), "part 0: type_name"),
    Rule("a type of 24 bytes", kind(0, type_name=b"F" * 24), "part 0: type_name"),
    Rule("two dimensions, one axis", kind(1, ne1=0), "no shape"),
    Rule("two dimensions, no elements", kind(1, ne0=0), "no shape"),
    Rule("one dimension of 2^63", kind(1, dimension_count=1, ne0=1 << 63, ne1=0), "no shape"),
    Rule("a product of 2^63", kind(1, ne0=1 << 31, ne1=1 << 32), "no shape"),
    Rule("a part one byte past its blob", at_the_end(1), "not inside the blob"),
    Rule(
        "a part longer than its blob",
        both(
            kind(0, length=12289),
            record("blob", 0, offset=0),
            record("part", 0, offset=0, stored_length=12289),
        ),
        "12289 bytes at 0 of file 0 are not inside the blob",
    ),
    Rule("a blob one step past its file", blob_to_the_end(4096), "not inside experts-00000.bin"),
    Rule("a kind of no bytes", kind(0, length=0), "part 0: length"),
    Rule("a kind of 2^63 bytes", kind(0, length=1 << 63), "part 0: length"),
    Rule("65 parts a blob", record("family", 1, parts_per_blob=65), "expected 1 to 64"),
    Rule("a blob off its alignment", moved("blob", 1, offset=512), "blob 1: offset"),
    Rule("no length, but a place", record("blob", 1, length=0, file=1), "blob 1: no length"),
    Rule("a blob of odd bytes", moved("blob", 1, length=-1), "blob 1: length"),
    Rule("names that differ in case", named_files("AZ.bin", "az.bin"), "files: two are named"),
    Rule("the same, reversed", named_files("az.bin", "AZ.bin"), "files: two are named"),
    Rule("a section of odd records", section("blobs", record_length=36), "blobs: record_length"),
    # Counts and lengths that are allowed, so that a later rule refuses.
    Rule("65,536 experts", record("family", 0, expert_count=65536), "family 1: first_blob"),
    Rule("64 parts", record("family", 1, parts_per_blob=64), "no more than there are part kinds"),
    Rule("2^63 - 1 bytes", kind(0, length=(1 << 63) - 1), "stored_length"),
    Rule("a blob in the file behind the last", record("blob", 0, file=3), "file: expected less"),
    Rule("the last layer first", record("family", 0, layer=7), "families: layer 1 stands behind"),
    Rule(
        "two families of a layer, one name",
        record("family", 1, layer=0),
        "families: layer 0 has two named ffn_exps",
    ),
]
ALLOWED = [
    Rule("a part at the end of its blob", at_the_end(0), ""),
    Rule("a part as long as its blob", as_long_as_its_blob, ""),
    Rule("a blob up to the end of its file", blob_to_the_end(0), ""),
    Rule("a blob as long as its file", record("blob", 1, length=24576), ""),
    Rule("a file of 2^63 - 1 bytes", longest_file, ""),
    Rule("the largest alignment", large_alignment, ""),
    Rule("tensors aligned to more than blobs", record("header", 0, tensor_alignment=1 << 30), ""),
    Rule("a shape of one dimension", kind(1, dimension_count=1, ne0=(1 << 63) - 1, ne1=0), ""),
    Rule("a shape of none", kind(1, dimension_count=0, ne0=0, ne1=0), ""),
    Rule("the largest product", kind(1, ne0=(1 << 63) - 1, ne1=1), ""),
    Rule("the last of all layers", record("family", 1, layer=(1 << 32) - 1), ""),
    Rule("two families", lambda draft: second_family(draft, b"-._"), ""),
    Rule("the longest family", record("family", 1, name=b"n" * 31), ""),
    Rule("the longest names", kind(1, name=b"n" * 63, type_name=b"t" * 23), ""),
    Rule("all kinds of letters", kind(1, name=b"-_.09AZaz", type_name=b"z_9.Z"), ""),
    Rule("an unknown type", kind(1, flags=1, type_id=(1 << 32) - 1, interleaved_row_count=0), ""),
    Rule("hotness that was not measured", record("family", 0, flags=0), ""),
    Rule("names of files that look like devices", other_names, ""),
    Rule("files whose digests are not known", record("file", 0, flags=1), ""),
    Rule("a blob in a shard", record("file", 0, kind=1), ""),
    Rule("the last shard", kind(0, shard=(1 << 16) - 1, shard_offset=(1 << 63) - 1), ""),
    Rule(
        "tensors of their own, whose slices nobody asks for",
        kind(0, flags=2, first_slice=(1 << 32) - 1, shard_offset=0, stride=0),
        "",
    ),
    Rule("unknown optional sections", with_section(NewSection("slices2", 0)), ""),
    Rule("an optional section that is said to be required", section("tensors", flags=1), ""),
    Rule("required ones that are not", section("files", flags=0), ""),
    Rule("a tensor of no bytes", tensor(length=0, stored_length=0, ne0=0), ""),
    Rule("one at the end of its file", tensor(offset=20480 - 16), ""),
    Rule("one of four dimensions", tensor(dimension_count=4, ne1=1, ne2=1, ne3=(1 << 61) - 1), ""),
    Rule("one of none", tensor(dimension_count=0, ne0=0), ""),
    Rule("one with an inferred type", tensor(flags=1, type_id=99), ""),
    Rule("one from the end of a shard", tensor(shard=65535, shard_offset=(1 << 63) - 17), ""),
    *(
        Rule(f"one called {name!r}", tensor(name=name.encode()), "")
        for name in ("x" * 63, "a b\n\x7f", "\x80\u07ff", "\u0800\ud7ff\ue000\uffff", "\U00010000",
                     "\U0010ffff", "x" * 61 + "é", "token_embd.weight")
    ),
]
# Only the manifest, which the C reader leaves out, could tell.
MANIFESTS_RULES = (longer_file, swapped_files)
ALL_RULES = [
    *(
        rule
        for rules in (*INDEX_RULES.values(), TENSOR_RULES)
        for rule in rules
        if rule.breaks not in MANIFESTS_RULES
    ),
    *MORE_RULES,
]


def drafts(small: Path, folder: Path, rules: list[Rule]) -> list[Path]:
    """Make a pack for each rule, with all digests right."""
    paths = []
    for number, rule in enumerate(rules):
        path = Path(shutil.copytree(small, folder / str(number)))
        draft = Draft(path)
        rule.breaks(draft)
        draft.save()
        paths.append(path)
    return paths


def test_each_rule_of_the_index_is_kept_by_the_c_reader(
    small: Path, tmp_path: Path, program: Path
) -> None:
    paths = drafts(small, tmp_path, ALL_RULES)
    verdicts = c_says(program, "check", paths)
    for rule, path, verdict in zip(ALL_RULES, paths, verdicts, strict=True):
        code = verdict.refusal.partition(" ")[0]
        assert code == expected_code(rule), rule.name
        assert "index.bin: " in verdict.refusal
        assert rule not in MORE_RULES or rule.words in verdict.refusal, rule.name
        expected = python_says(path)
        assert expected.place, rule.name
        # The check that is meant refuses, not a later one.
        assert f"index.bin: {expected.place}: " in f"{verdict.refusal} ", (rule.name, expected)
    assert len({verdict.refusal for verdict in verdicts}) > 0.8 * len(verdicts)


def expected_code(rule: Rule) -> str:
    if rule.name.startswith("version"):
        return "VERSION"
    return "FEATURE" if "needs the section" in rule.words else "DAMAGED"


def test_what_a_reader_does_not_need_and_what_is_allowed_is_read(
    small: Path, tmp_path: Path, program: Path
) -> None:
    rules = [*VERIFIERS_RULES, *ALLOWED]
    paths = drafts(small, tmp_path, rules)
    for rule, path, verdict in zip(rules, paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal == "", rule.name
        assert verdict == python_says(path), rule.name


def write_pack(path: Path, index: bytes, small: Path) -> Path:
    """Write an index with its digest made right, and a manifest and links that fit it."""
    index = index[:-8] + struct.pack("<Q", digest.of(index[:-8])) if len(index) >= 8 else index
    body = manifest_of(small)
    files = [dict(entry) for entry in body["files"]]
    size = records.FileRecord.LAYOUT.size
    for number, entry in enumerate(files):
        at = first_file(small) + number * size
        if at + size <= len(index):
            held = records.FileRecord.unpack(index, at)
            entry["name"] = held.name.partition(b"\0")[0].decode("latin-1")
            entry["length"] = held.length
    if len(index) >= 8:
        body["index"] = manifest.describe_index(index).to_json()
    path.mkdir()
    (path / "index.bin").write_bytes(index)
    for held in small.iterdir():
        if held.name not in ("index.bin", "manifest.json"):
            (path / held.name).symlink_to(held)
    text = json.dumps(body | {"files": files}, indent=2)
    (path / "manifest.json").write_bytes(sealed(text))
    return path


def first_file(pack: Path) -> int:
    """Return where the table of files begins."""
    return Draft(pack).at("file", 0)


def manifest_of(pack: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((pack / "manifest.json").read_bytes())
    del body["manifest_digest"]
    return body


def assert_agreement(
    indexes: list[bytes], small: Path, folder: Path, program: Path
) -> list[Verdict]:
    """Feed indexes, with digests made right, to C and to Python: one verdict, equal lookups."""
    body = manifest_of(small)
    paths = [write_pack(folder / str(n), data, body) for n, data in enumerate(indexes)]
    verdicts = c_says(program, "check", paths)
    for path, verdict in zip(paths, verdicts, strict=True):
        expected = python_says(path)
        assert verdict.agrees(expected), (path, verdict.refusal, expected.refusal)
    return verdicts


def test_c_and_python_agree_on_a_bit_flipped_in_any_byte(
    small: Path, tmp_path: Path, program: Path
) -> None:
    index = (small / "index.bin").read_bytes()
    flipped = []
    for at in range(len(index) - 8):
        for bit in {at % 8, 0}:
            damaged = bytearray(index)
            damaged[at] ^= 1 << bit
            flipped.append(bytes(damaged))
    verdicts = assert_agreement(flipped, small, tmp_path, program)
    refused = sum(bool(verdict.refusal) for verdict in verdicts)
    assert 0.5 < refused / len(verdicts) < 1


def test_c_and_python_agree_on_random_damage(small: Path, tmp_path: Path, program: Path) -> None:
    index = (small / "index.bin").read_bytes()
    damaged = [mutate(index, random_edits(seed, len(index))) for seed in range(600)]
    assert_agreement(damaged, small, tmp_path, program)


def test_an_index_cut_at_any_byte_is_refused(small: Path, tmp_path: Path, program: Path) -> None:
    """As it is, and with the header and the digest made to fit."""
    index = (small / "index.bin").read_bytes()
    body = manifest_of(small)
    paths = []
    for length in range(len(index)):
        stated = bytearray(index[:length])
        if length >= 40:
            stated[32:40] = struct.pack("<Q", length)
        if length % 8 == 0:
            paths.append(write_pack(tmp_path / f"{length}-stated", bytes(stated), body))
        path = tmp_path / str(length)
        path.mkdir()
        (path / "index.bin").write_bytes(index[:length])
        (path / "manifest.json").touch()
        paths.append(path)
    for path, verdict in zip(paths, c_says(program, "check", paths), strict=True):
        assert verdict.refusal, path


def test_a_flipped_bit_is_noticed_by_the_digest(small: Path, tmp_path: Path, program: Path) -> None:
    index = (small / "index.bin").read_bytes()
    paths = []
    for at in range(len(index)):
        paths.append(tmp_path / str(at))
        paths[-1].mkdir()
        damaged = bytearray(index)
        damaged[at] ^= 1 << at % 8
        (paths[-1] / "index.bin").write_bytes(damaged)
        (paths[-1] / "manifest.json").touch()
    codes = [verdict.refusal.partition(" ")[0] for verdict in c_says(program, "check", paths)]
    assert set(codes[:128]) == {"VERSION", "FEATURE", "DAMAGED", "DIGEST"}
    assert set(codes[128:]) <= {"DIGEST", "DAMAGED"}
    assert codes.count("DAMAGED") < 250  # the header, and the zeros between sections


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def folder_for(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return change


def pipe_for(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def cut(name: str, length: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, length)


def loop_for(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(name)

    return change


DATA = "experts-00001.bin"
BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (without("manifest.json"), "NOT_A_PACK manifest.json"),
    "a folder for a manifest": (folder_for("manifest.json"), "NOT_A_PACK manifest.json"),
    "nothing": (shutil.rmtree, "NOT_A_PACK manifest.json"),
    "no index": (without("index.bin"), "DAMAGED index.bin: the file is missing"),
    "a folder for an index": (folder_for("index.bin"), "DAMAGED index.bin: not a regular file"),
    "a pipe for an index": (pipe_for("index.bin"), "DAMAGED index.bin: not a regular file"),
    "an empty index": (cut("index.bin", 0), "DAMAGED index.bin: cut short"),
    "an index of 135 bytes": (cut("index.bin", 135), "DAMAGED index.bin: cut short"),
    "an index of 136 bytes": (cut("index.bin", 136), "DAMAGED index.bin: index_length"),
    "no data": (without(DATA), f"DAMAGED {DATA}: the file is missing"),
    "a pipe for data": (pipe_for(DATA), f"DAMAGED {DATA}: not a regular file"),
    "a folder for data": (folder_for(DATA), f"DAMAGED {DATA}: not a regular file"),
    "a link to itself": (loop_for(DATA), f"SYSTEM {DATA}: cannot open: "),
    "data cut in a part": (cut(DATA, 10), f"SHORT_READ {DATA}: expected 32 bytes at 0, found 10"),
    "no bytes of data": (cut(DATA, 0), f"SHORT_READ {DATA}: expected 32 bytes at 0, found 0"),
    "a changed byte": (lambda path: flip(path / DATA, 31), f"DIGEST {DATA}: ffn_gate_exps.weight"),
}


def test_files_that_are_missing_cut_or_changed_are_named(
    small: Path, tmp_path: Path, program: Path
) -> None:
    paths = []
    for number, (damage, _) in enumerate(BAD_FILES.values()):
        paths.append(Path(shutil.copytree(small, tmp_path / str(number))))
        damage(paths[-1])
    verdicts = c_says(program, "list", paths)
    for name, verdict in zip(BAD_FILES, verdicts, strict=True):
        assert verdict.refusal.startswith(BAD_FILES[name][1]), (name, verdict.refusal)


def test_symbolic_links_are_followed_and_a_long_path_is_an_error(
    small: Path, tmp_path: Path, program: Path
) -> None:
    for name in os.listdir(small):
        (tmp_path / name).symlink_to(small / name)
    paths = [tmp_path, Path("/" + "x/" * 2100), Path("/" + "x" * 300), small / "index.bin"]
    linked, long, odd, file = c_says(program, "list", paths)
    assert linked == python_says(small, reads=True)
    assert long.refusal == "BUFFER manifest.json: the path is too long"
    assert odd.refusal == "SYSTEM manifest.json: cannot find: File name too long"
    assert file.refusal.startswith("NOT_A_PACK manifest.json: ")


# The example.


def example_on(packs: dict[str, Path], program: Path, layer: int, experts: list[int]) -> list[str]:
    command = [str(program), str(packs["gpt-oss"]), str(layer), *map(str, experts)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if "io_uring_queue_init" in run.stderr:
        pytest.skip("io_uring does not work here")
    assert run.stderr == ""
    assert run.returncode == 0
    return run.stdout.splitlines()


@pytest.mark.parametrize("flags", [(), ("-DUSE_URING", "-luring")], ids=["pread", "uring"])
def test_the_example_reads_what_the_router_chose(
    flags: tuple[str, ...], packs: dict[str, Path], tmp_path: Path
) -> None:
    if flags and not Path("/usr/include/liburing.h").exists():
        pytest.skip("liburing is not installed here")
    source = ROOT / "examples" / "routed_experts.c"
    sanitizers = () if flags else SANITIZERS  # liburing shares memory that they know nothing of
    run = compiled(
        "cc", "-std=gnu99", "-Wno-pedantic", *sanitizers, source, *flags, "-o", tmp_path / "x"
    )
    assert run.returncode == 0, run.stderr
    with moepack.open(packs["gpt-oss"]) as pack:
        layer = pack.layers[-1]
        chosen = [3, 0, pack.expert_count(layer) - 1, 3]
        assert example_on(packs, tmp_path / "x", layer, chosen) == [
            f"expert {expert} {kind.name}: {kind.type_name}, {kind.length} bytes, sound"
            for expert in chosen
            for kind in pack.parts(layer)
        ]
