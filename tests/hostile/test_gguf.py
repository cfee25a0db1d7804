"""Hostile GGUF headers: each rule broken alone, every truncation, giants, and random damage."""

import dataclasses
import itertools
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.common.errors import MachineError, SourceError
from moepack.pack.verifying import witness
from moepack.source import experts, gguf_header
from moepack.source.shards import Source, open_source
from tests.support.broken_ggufs import BROKEN, LONGEST, STARTS, Broken, small
from tests.support.children import within
from tests.support.gguf_builder import F32, Q8_0, GgufBuilder, TensorSpec, add_experts, moe, split
from tests.support.gguf_builder import write_shards as write_all
from tests.support.hostile_input import (
    EFFORTS,
    MAX_MEMORY,
    MAX_SECONDS,
    assert_cheap,
    assert_clear,
    measured,
    mutants,
    refused_by,
)

HEADER_LENGTH = len(small().header())


def refused(path: Path) -> SourceError:
    """Read a header that is no good; give the error after a look at its shape."""
    return refused_by(SourceError, path, lambda: gguf_header.read(path))


def assert_sound(header: gguf_header.GgufHeader) -> None:
    """Check what every accepted header promises: aligned, disjoint tensors inside the file."""
    reached = header.data_offset
    for tensor in header.tensors:
        assert (tensor.offset - header.data_offset) % header.alignment == 0
        assert reached <= tensor.offset
        reached = tensor.offset + tensor.length
    if header.tensors:
        assert reached <= header.file_length
    assert len({tensor.name for tensor in header.tensors}) == len(header.tensors)


# Rules, one by one.


def test_the_small_file_is_sound(tmp_path: Path) -> None:
    header = gguf_header.read(small().write(tmp_path / "small.gguf"))
    assert_sound(header)
    offsets = [tensor.offset - header.data_offset for tensor in header.tensors]
    assert offsets == [0, 128, 160, 224, 288, 352]
    assert header.data_offset == HEADER_LENGTH


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_each_rule_has_an_error_that_says_what_is_wrong(broken: Broken, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(broken.data)
    error = refused(path)
    assert broken.place in str(error.place)
    assert broken.problem in f"{error.problem}, {error.expected}"
    assert broken.expected in str(error.expected)
    assert broken.found in str(error.found)
    assert broken.hint in str(error.hint)
    look_with_witness(path)


@pytest.mark.parametrize(
    ("field", "limit", "smallest", "place"),
    [
        ("tensor_count", gguf_header.MAX_TENSORS, 24, "tensor count"),
        ("pair_count", gguf_header.MAX_PAIRS, 13, "key-value count"),
    ],
)
def test_counts_are_limited_also_where_the_file_has_room(
    field: str, limit: int, smallest: int, place: str, tmp_path: Path
) -> None:
    builder = GgufBuilder(trailing=bytes(2 * limit * smallest))
    setattr(builder, field, limit + 1)
    error = refused(builder.write(tmp_path / "many.gguf"))
    assert (error.place, error.expected, error.found) == (place, f"<= {limit:,}", limit + 1)


def test_strings_are_limited_over_all_arrays_together(tmp_path: Path) -> None:
    count = gguf_header.MAX_ARRAY_STRINGS // 2 + 1
    value = struct.pack("<IIQ", 9, 8, count) + bytes(8 * count)
    builder = GgufBuilder(metadata=[("one", "raw", value), ("two", "raw", value)])
    error = refused(builder.write(tmp_path / "many.gguf"))
    assert (error.place, error.problem) == ("key 'two'", "too many strings")
    assert error.found == 2 * count


def test_a_long_key_does_not_make_a_long_message(tmp_path: Path) -> None:
    for character in ("k", "\n", "\U0001f4a9"):
        key = character * (gguf_header.MAX_KEY_LENGTH // len(character.encode()))
        value = struct.pack("<I", 13)
        refused(GgufBuilder(metadata=[(key, "raw", value)]).write(tmp_path / "long.gguf"))


def test_a_file_cut_at_any_byte_is_refused_but_in_the_last_padding(tmp_path: Path) -> None:
    data = small().bytes()
    path = tmp_path / "cut.gguf"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        if length < len(data) - 16:
            assert refused(path).hint, length
        else:
            assert_sound(gguf_header.read(path))


def test_a_header_cut_at_any_byte_of_a_large_vocabulary_is_refused(tmp_path: Path) -> None:
    """The strings of the array lie across the edge of the window through which it is read."""
    words = [f"word {number}" * (number % 7) for number in range(40_000)]
    data = small().put("tokens", "arr:str", words).bytes()
    assert len(data) > 1 << 20
    path = tmp_path / "cut.gguf"
    assert_sound(gguf_header.read(small().put("tokens", "arr:str", words).write(path)))
    for length in [500, *range((1 << 20) - 20, (1 << 20) + 20), len(data) - 2000, len(data) - 17]:
        path.write_bytes(data[:length])
        assert "download it again" in str(refused(path).hint)


# Files that are something else.


@pytest.mark.parametrize("name", ["m.gguf.part1of3", "m.gguf-split-a", "m.gguf.part-aa"])
def test_a_piece_cut_by_bytes_is_to_be_joined_first(name: str, tmp_path: Path) -> None:
    data = small().bytes()
    path = tmp_path / name
    for piece in (data[:900], data[900:]):
        path.write_bytes(piece)
        assert "cat" in str(refused(path).hint)
        with pytest.raises(SourceError) as caught:
            open_source([tmp_path])
        assert "cat" in str(caught.value.hint)


@pytest.mark.parametrize("broken", STARTS, ids=lambda broken: broken.name)
def test_a_later_shard_that_is_no_gguf_is_named(broken: Broken, tmp_path: Path) -> None:
    shards = write_all(split(small(), 3), tmp_path)
    shards[1].write_bytes(broken.data)
    with pytest.raises(SourceError) as caught:
        open_source([shards[0]])
    assert_clear(caught.value, shards[1])


def test_a_folder_named_like_a_model_is_no_model(tmp_path: Path) -> None:
    folder = tmp_path / "model.gguf"
    folder.mkdir()
    with pytest.raises((SourceError, MachineError)) as caught:
        gguf_header.read(folder)
    assert_clear(caught.value, folder)
    with pytest.raises((SourceError, MachineError)):
        open_source([tmp_path])


def test_a_pipe_does_not_make_it_wait(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    os.mkfifo(path)
    assert "not a file" in str(within(lambda: refused(path)))


# Experts that make no sense.


class Odd(NamedTuple):
    """Experts that make no sense, and what the message must hold."""

    name: str
    builder: GgufBuilder
    words: str


def _model(**values: Any) -> GgufBuilder:
    builder = GgufBuilder().put("general.architecture", "str", "m")
    for key, value in values.items():
        builder.put(f"m.{key}", "u32", value)
    return builder


def _down(builder: GgufBuilder, **fields: Any) -> GgufBuilder:
    spec = dataclasses.replace(builder.tensors[4], **fields)
    builder.tensors[4] = spec
    return builder


def _alone(*experts_there: int, count: int | None = None, ne1: int = 2) -> GgufBuilder:
    builder = _model() if count is None else _model(expert_count=count)
    for name, expert in itertools.product(("gate", "up", "down"), experts_there):
        rows = ne1 if (name, expert) == ("up", 1) else 2
        builder.tensor(f"blk.0.ffn_{name}.{expert}.weight", (4, rows), F32, 16)
    return builder


def _other_type() -> GgufBuilder:
    builder = _alone(0, 1)
    builder.tensors[1].type_id = 26
    return builder


def _chunks() -> GgufBuilder:
    return small().tensor("blk.0.ffn_up_chexps.weight", (4, 2, 2), F32, 16)


BIAS = "blk.0.ffn_up_exps.bias"
SCALE = "blk.0.ffn_up_exps.scale"
GATE = "blk.0.ffn_gate_exps.weight"
NORM = "blk.0.ffn_norm_exps.weight"
LINES = GgufBuilder().put("general.architecture", "str", "a\nb\x1b[2J" + "c" * 1000)
ODD = [
    Odd("one dimension too few", _down(small(), dims=(2, 8)), "expected 3, found 2"),
    Odd("one dimension too many", _down(small(), dims=(2, 4, 1, 2)), "expected 3, found 4"),
    Odd("no experts in it", _down(small(), dims=(2, 4, 0), data=b""), "an empty tensor"),
    Odd("another expert count", _down(small(), dims=(2, 2, 4)), "expected 2, found 4"),
    *(
        Odd(f"a tensor called {name}", _down(small(), name=name), "unknown kind")
        for name in (
            *("blk.0.ffn_side_exps.weight", "blk.0.ffn_up_exps.lora_a"),
            *("blk.0.ffn_up_exps.weight.lora_a", "enc.blk.0.ffn_up_exps.weight"),
            "blk.100000.ffn_up_exps.weight",
        )
    ),
    Odd("a bias of one dimension", _model().tensor(BIAS, (4,), F32, 16), "expected 2, found 1"),
    Odd("a scale of two dimensions", _model().tensor(SCALE, (4, 4), F32, 16), "expected 1"),
    Odd("chunk experts without down", _chunks(), "a projection is missing"),
    Odd("a layer past the model", _down(small(), name="blk.1.ffn_down_exps.weight"), "block_count"),
    Odd("no down", _down(small(), name="other", dims=(16,)), "a projection is missing"),
    Odd("a gap in the experts", _alone(0, 1, 3), "no expert 2"),
    Odd("fewer experts than stated", _alone(0, 1, count=3), "no expert 2"),
    Odd("more experts than stated", _alone(0, 1, 2, count=2), "expected 0 to 1"),
    Odd("other experts than stated", _alone(0, 2, count=2), "no expert 1"),
    Odd("experts across blocks", _model().tensor(SCALE, (32,), Q8_0, 34), "32 equal slices"),
    Odd("half a group of rows", _model().tensor(GATE, (32, 12, 2), 208, 34), "multiple of 8"),
    Odd("a norm of two dimensions", _model().tensor(NORM, (4, 2), F32, 16), "unknown kind"),
    Odd("an expert of another shape", _alone(0, 1, ne1=4), "another type or shape"),
    Odd("an expert of another type", _other_type(), "another type or shape"),
    Odd("an expert by two names", _alone(0, 1).tensor("blk.00.ffn_up.0.weight", (4, 2), 0, 16), ""),
    Odd("both kinds of tensors", _alone(0, 1).tensor(GATE, (4, 2, 2), F32, 16), "stands beside"),
    Odd("more biases", _alone(0, 1).tensor(BIAS, (2, 3), F32, 8), "have other expert counts"),
    Odd("an open length", moe((0,)).tensor(BIAS, (8, 4), 777, 9), f"{BIAS}': unknown type-777"),
    Odd("one scale", _model().tensor(GATE, (64, 32, 4), 36, 16, tail=32), "one scale for all"),
    Odd("no tensors", _model(), "a GGUF without tensors"),
    Odd("a name of several lines", LINES.tensor("x", (4,), F32, 16), "dense"),
    Odd("a dense model", _model().tensor("blk.0.ffn_up.weight", (4, 2), F32, 16), "dense"),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_experts_that_make_no_sense_are_refused_by_name(odd: Odd, tmp_path: Path) -> None:
    path = odd.builder.write(tmp_path / "odd.gguf")
    with pytest.raises(SourceError) as caught:
        experts.find_experts(open_source([path]))
    assert_clear(caught.value, path)
    assert odd.words in str(caught.value)
    look_with_witness(path)


def test_metadata_that_says_nothing_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """The tensor table decides; arctic's norm is no expert's."""
    builder = small().put("qwen3moe.expert_count", "str", "some")
    builder.put("qwen3moe.block_count", "str", "many").put(
        "qwen3moe.nextn_predict_layers", "u32", 1
    )
    builder.put("qwen3moe.expert_used_count", "arr:f32", [1.0])
    source = open_source([builder.tensor(NORM, (4,), F32, 16).write(tmp_path / "m.gguf")])
    family = experts.find_experts(source).families[0]
    assert (family.expert_count, family.experts_used) == (2, None)
    assert experts.mtp_start(source) is None


def test_layers_and_experts_are_limited(tmp_path: Path) -> None:
    for layer, count in ((70_000, 2), (0, experts.MAX_EXPERTS + 1)):
        builder = _model()
        for name in ("up", "down"):
            builder.tensor(f"blk.{layer}.ffn_{name}_exps.weight", (1, 1, count), F32, 4)
        path = builder.write(tmp_path / "many.gguf")
        with pytest.raises(SourceError, match="out of bounds"):
            experts.find_experts(open_source([path]))


# Giants: seconds and 100 MB, in a process of its own.

FIND = (
    "from moepack.source import experts, shards",
    "experts.find_experts(shards.open_source([path]))",
)
WITNESS = ("from moepack.pack.verifying import witness", "witness.read_shards([path])")


def sparse(builder: GgufBuilder, path: Path, length: int = (1 << 30) + (1 << 28)) -> Path:
    """Write a header into a file of more than a gigabyte that takes no space."""
    path.write_bytes(builder.header())
    os.truncate(path, length)
    return path


def _claims(type_id: int, count: int) -> GgufBuilder:
    return GgufBuilder(metadata=[("a", "raw", struct.pack("<IIQ", 9, type_id, count))])


def _full_tables() -> GgufBuilder:
    """Fill all tables to their limits, with the fault in the last entry."""
    strings = struct.pack("<IIQ", 9, 8, gguf_header.MAX_ARRAY_STRINGS)
    strings += bytes(8 * gguf_header.MAX_ARRAY_STRINGS)
    builder = GgufBuilder(metadata=[("strings", "raw", strings)])
    builder.metadata += [(f"key {n}", "u32", n) for n in range(gguf_header.MAX_PAIRS - 1)]
    names = [f"blk.{n}.attn_norm.weight" for n in range(gguf_header.MAX_TENSORS - 1)]
    builder.tensors = [TensorSpec(name, (0,), F32, b"") for name in [*names, names[0]]]
    return builder


def _kept_numbers() -> GgufBuilder:
    """Fill all pairs with the longest arrays whose numbers are kept."""
    count = gguf_header.KEPT_ARRAY_COUNT
    value = struct.pack("<IIQ", 9, 12, count) + struct.pack("<d", 0.1) * count
    return GgufBuilder(metadata=[(f"{n}", "raw", value) for n in range(gguf_header.MAX_PAIRS)])


def _wide_text() -> GgufBuilder:
    """Fill all pairs with the longest keys and texts that are kept, of the widest letters."""
    value = "\U0001f4a9" + "a" * (gguf_header.KEPT_STRING_LENGTH - 4)
    key = "\U0001f4a9" + "a" * (LONGEST - 9)
    return GgufBuilder(
        metadata=[(f"{key}{n:05}", "str", value) for n in range(gguf_header.MAX_PAIRS)]
    )


def _unknown_type() -> GgufBuilder:
    """Leave a thousand million lengths open, by a gap in an alignment of 2^30."""
    builder = _model().put("general.alignment", "u32", 1 << 30)
    builder.alignment = 32  # as in the header; the data section is made by the sparse file
    builder.tensors = [TensorSpec("blk.0.ffn_up_exps.weight", (1, 1, 1), 999, b"")]
    return builder


GIANTS: list[tuple[str, Callable[[], GgufBuilder], int]] = [
    ("an array of 2^27 u64 that is not there", lambda: _claims(10, 1 << 28), (1 << 30) + 64),
    ("an array of 2^27 u64 that is there", lambda: _claims(10, 1 << 27), (1 << 30) + (1 << 20)),
    ("100 million empty strings", lambda: _claims(8, 100_000_000), (1 << 30) + 64),
    ("65536 tensors of zeros", lambda: GgufBuilder(tensor_count=1 << 16), (1 << 30) + 64),
    (
        "a string of a gigabyte",
        lambda: GgufBuilder(metadata=[("a", "raw", struct.pack("<IQ", 8, 1 << 30))]),
        (1 << 30) + (1 << 20),
    ),
    ("all tables filled to their limits", _full_tables, (1 << 30) + (1 << 28)),
    ("all pairs filled with numbers", _kept_numbers, 1 << 31),
    ("all pairs filled with wide text", _wide_text, 1 << 31),
    ("a type whose length is open", _unknown_type, (1 << 31) + (1 << 28)),
]


@pytest.mark.parametrize(
    ("make", "length"), [giant[1:] for giant in GIANTS], ids=[giant[0] for giant in GIANTS]
)
def test_giants_are_refused_within_seconds_and_100_mb(
    make: Callable[[], GgufBuilder], length: int, tmp_path: Path
) -> None:
    assert_cheap(FIND, sparse(make(), tmp_path / "giant.gguf", length))


def test_an_expert_count_of_four_billion_costs_nothing(tmp_path: Path) -> None:
    outcome = assert_cheap(FIND, _alone(0, 1, count=0xFFFFFFFF).write(tmp_path / "many.gguf"))
    assert "no expert 2" in outcome.text


def test_a_name_that_claims_99999_shards_costs_nothing(tmp_path: Path) -> None:
    path = small().put("split.count", "u16", 9).write(tmp_path / "m-00001-of-99999.gguf")
    assert "99998 of 99999 shards are missing" in assert_cheap(FIND, path).text


# The verifier's own parser: it gets shards that are sound, and must not fall over others.


@pytest.mark.parametrize("name", ["blk.\u00b2.ffn_up_exps.weight", "blk.0.ffn_up.\u00b2.weight"])
def test_the_witness_takes_plain_digits_only(name: str, tmp_path: Path) -> None:
    dims = (4, 2, 2) if "exps" in name else (4, 2)
    path = _model().tensor(name, dims, F32, 16).write(tmp_path / "digits.gguf")
    witnessed = look_with_witness(path)
    assert witnessed is not None
    assert not witnessed.parts


def test_the_witness_does_not_divide_by_no_experts(tmp_path: Path) -> None:
    builder = _model().put("general.alignment", "u32", 1)
    builder.alignment = 1
    builder.tensors = [TensorSpec(GATE, (4, 2, 0), 999, bytes(8))]
    assert look_with_witness(builder.write(tmp_path / "none.gguf")) is None


def test_the_witness_is_not_drowned_by_an_alignment(tmp_path: Path) -> None:
    builder = _unknown_type()
    builder.tensors[0].type_id = F32
    outcome = measured(WITNESS, sparse(builder, tmp_path / "giant.gguf", 1 << 31))
    assert outcome.seconds < MAX_SECONDS
    assert outcome.memory < MAX_MEMORY


def look_with_witness(path: Path) -> witness.Witness | None:
    """Return what the witness finds, None where it refuses as it should."""
    try:
        return witness.read_shards([str(path)])
    except SourceError as error:
        assert_clear(error, path)
        return None


# Random damage.

STEMS = (
    *("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps", "attn_v_exps"),
    *("ffn_up_chexps", "ffn_down_chexps", "ffn_up.0", "ffn_up.1", "ffn_down.0", "ffn_norm_exps"),
)
RANKS = {"weight": 3, "bias": 2, "scale": 1, "input_scale": 1}
KEYS = ("expert_count", "block_count", "experts_per_group", "attention.value_expert_count")


@st.composite
def any_models(draw: st.DrawFn) -> bytes:
    """Draw a GGUF whose tensors lie as they should, whatever they are."""
    builder = GgufBuilder().put("general.architecture", "str", "m")
    experts_each = draw(st.sampled_from((1, 2, 3)))
    for key in draw(st.sets(st.sampled_from(KEYS))):
        numbers = (*[experts_each] * 7, 0, 1, 2, 3, 0xFFFF)
        builder.put(f"m.{key}", "u32", draw(st.sampled_from(numbers)))
    layers = st.sampled_from(("0", "0", "0", "0", "1", "1", "00", "65536", "99999"))
    names = st.tuples(layers, st.sampled_from(STEMS), st.sampled_from(["weight"] * 5 + [*RANKS]))
    usual = [("0", "ffn_up_exps", "weight"), ("0", "ffn_down_exps", "weight")]
    drawn = draw(st.lists(names, max_size=5, unique=True))
    for layer, stem, suffix in [*(usual if draw(st.booleans()) else []), *drawn]:
        name = f"blk.{layer}.{stem}.{suffix}"
        if all(tensor.name != name for tensor in builder.tensors):
            rank = RANKS[suffix] - (stem[-1] in "01") - 2 * (stem == "ffn_norm_exps")
            rank = draw(st.sampled_from([rank] * 30 + [0, 1, 2, 3, 4]))
            _add_any(draw, builder, name, rank, experts_each)
    return builder.bytes()


def _add_any(draw: st.DrawFn, builder: GgufBuilder, name: str, rank: int, count: int) -> None:
    """Add a tensor of any type whose last dimension is mostly `count`."""
    type_id, block, length = draw(
        st.sampled_from([(F32, 1, 4), (24, 1, 1), (Q8_0, 32, 34), (36, 4, 1), (208, 32, 34)])
        | st.sampled_from([(F32, 1, 4), (999, 1, 3), (999, 32, 80)])
    )
    blocks = draw(st.integers(1, 2))
    others = [draw(st.sampled_from((1, 2, 3, 4, 8, 32))) for _ in range(rank - 1)]
    if others:
        others[-1] = draw(st.sampled_from([count] * 20 + [0, 1, 2]))
    dims = (block * blocks, *others)[:rank] if rank != 1 else (count,)
    row_length = length * blocks if rank != 1 else length * count // block
    builder.tensor(name, dims, type_id, row_length, tail=32 if type_id == 36 else 0)


def look(data: bytes, path: Path) -> Source | None:
    """Take data through all of reading a source: a value that keeps its promises, or an error."""
    path.write_bytes(data)
    theirs = look_with_witness(path)
    try:
        source = open_source([path])
        assert_sound(source.shards[0])
        families = experts.find_experts(source)
        ours = slices(families)
    except SourceError as error:
        assert_clear(error, path)
        return None
    assert_disjoint(ours, source.shards[0].file_length)
    if theirs is not None:
        assert ours == {key: _comparable(value) for key, value in theirs.parts.items()}
        assert {name: walked[1:5] for name, walked in theirs.dense.items()} == {
            tensor.name: (tensor.dims, tensor.type_id, tensor.offset, tensor.length)
            for _, tensor in source.tensors()
            if tensor.name not in families.names
        }
    return source


Comparable = tuple[int, tuple[int, ...], int, tuple[int, ...]]


def slices(source_experts: experts.Experts) -> dict[tuple[int, str], Comparable]:
    """Return type, shape, length and starts of each part's slices."""
    result = {}
    for family in source_experts.families:
        for part in family.parts:
            starts = tuple(part.at(expert)[1] for expert in range(family.expert_count))
            result[family.layer, part.name] = (part.type_id, part.shape, part.length, starts)
    return result


def _comparable(theirs: witness.PartSlices) -> Comparable:
    return theirs.type_id, theirs.shape, theirs.length, tuple(start for _, start in theirs.places)


def assert_disjoint(parts: dict[tuple[int, str], Comparable], file_length: int) -> None:
    """Check that no two slices share a byte, and that all lie in the file."""
    extents = sorted(
        (start, start + length) for _, _, length, starts in parts.values() for start in starts
    )
    assert all(start < end <= file_length for start, end in extents)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(extents))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "hostile.gguf"


def _bases() -> Iterator[GgufBuilder]:
    yield small().put("general.alignment", "u32", 32).put("words", "arr:str", ["a", "bc"])
    yield moe((0, 2), 3, ne=(2, 2), type_id=F32, block=(1, 4))
    yield _alone(0, 1, 2, count=3)
    fused = _model(expert_count=2)
    add_experts(fused, 0, 2, (32, 32), 999, (32, 20), projections=("gate_up", "down"))
    yield fused.tensor("blk.0.ffn_down_exps.bias", (3, 2), F32, 12)


BASES = [builder.bytes() for builder in _bases()]
MUTANTS = st.one_of(*(mutants(builder.bytes(), len(builder.header())) for builder in _bases()))


def test_the_bases_of_the_mutants_are_sound(scratch: Path) -> None:
    assert all(look(base, scratch) for base in BASES)


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize(
    ("strategy", "is_refused"),
    [(MUTANTS, {True, False}), (any_models(), {True, False}), (st.binary(max_size=200), {True})],
    ids=["mutants", "models", "noise"],
)
def test_any_file_is_read_or_refused(
    scratch: Path, strategy: st.SearchStrategy[bytes], is_refused: set[bool], effort: settings
) -> None:
    outcomes = set()

    def check(data: bytes) -> None:
        outcomes.add(look(data, scratch) is None)

    effort(given(strategy)(check))()
    assert outcomes == is_refused
