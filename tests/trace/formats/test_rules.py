"""Rules that are one for all formats: nothing in it, an expert twice, numbers, lines."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moepack
from conformance import make_traces
from moepack.errors import TraceError
from moepack.hotness import measure as measuring
from moepack.trace.formats import registry
from moepack.trace.model import MAX_COUNT
from tests.support.trace_faults import refused
from tests.support.trace_forms import ALL, FEW, SMALL, npy, npz, pieces_of
from tests.support.trace_samples import (
    BINARIES,
    DECODE,
    PREFILL,
    TEXTS,
    Call,
    Trace,
    calls_of,
    only,
    read,
    shape_of,
    traces,
)

# Nothing in it.

EMPTY: dict[str, tuple[str, bytes]] = {
    "log": ("expert-log", b"main: model loaded\n---began prompt processing---\n---token\n"),
    "moe-flash": ("moe-flash", b"moe-flash: loaded manifest: 4 layers, 8 experts/layer\n"),
    "anemll": ("anemll", b"\n"),
    "mer": ("mer", b"\n"),
    "mer without experts": ("mer", b'{"token":0,"layer":1,"experts":[]}\n'),
    "route-csv": ("route-csv", b"turn,phase,step,layer,slot,expert,weight\n"),
    "call-csv": ("call-csv", b"decode_call,token_in_call,layer,occurrence,experts\n"),
    "second routers": (
        "call-csv", b"decode_call,token_in_call,layer,occurrence,experts\n0,0,1,1,5\n"
    ),
    "counts": ("counts", b"# tokens=5\nlayer,expert,count\n"),
    "counts of 0": ("counts", b"layer,expert,count\n0,0,0\n0,1,0\n"),
    "held out": ("counts", b"layer,expert,count,held_out\n"),
    "selections": ("counts", b"layer,expert\n"),
    "colibri-usage": ("colibri-usage", b"-1 48 128\n-2 1 9\n"),
    "usage of 0": ("colibri-usage", b"0 0 0\n0 1 0\n"),
    "colibri-route": ("colibri-route", b"\n"),
    "potatomaxx": ("potatomaxx", b"# all\n"),
    "mblt": ("mblt", b"MBLT\1\0\0\0\5\0\0\0"),
    "moepack": ("moepack", make_traces.file(make_traces.origin())),
    "npy": ("npy", npy(np.zeros((0, 2, 2), np.int32))),
    "npy of padding": ("npy", npy(np.full((3, 2, 2), -1))),
    "npz": ("npz", npz(logical_count=np.zeros((2, 2, 2), np.int32))),
    "npz without arrays": ("npz", b"PK\5\6" + bytes(18)),
    "json": ("json", b'{"routed_experts": []}'),
    "heat": ("json", b'{"layers": [{"layer": 0, "heat": [0, 0]}]}'),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_a_file_in_which_nothing_was_chosen_is_refused(name: str, tmp_path: Path) -> None:
    form, data = EMPTY[name]
    path, target = tmp_path / "trace", tmp_path / "out"
    path.write_bytes(data)
    for lenient in (False, True):
        error = refused(path, form=form, lenient=lenient)
        assert error.problem == "no selections in it"
        assert form in str(error.hint)
    for append in (False, True):
        options = registry.ReadOptions(form)
        with pytest.raises(TraceError, match="no selections in it"):
            moepack.import_trace([str(path)], target, append=append, options=options)
        assert os.listdir(tmp_path) == ["trace"]


@pytest.mark.parametrize("form", registry.NAMES)
def test_an_empty_file_is_refused_in_the_same_words_as_any_format(
    form: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"")
    assert refused(path, form=form).problem == "no selections in it"


def test_each_format_has_a_file_with_nothing_in_it() -> None:
    assert {form for form, _ in EMPTY.values()} | {"imatrix"} == set(registry.NAMES)


def test_what_is_left_of_a_file_of_faults_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"layer 70000 expert 1\nlayer 1 expert 70000\n")
    assert refused(path, lenient=True).found == "none, and 2 left out"


def test_an_empty_file_beside_others_stops_the_import(tmp_path: Path) -> None:
    whole, empty = tmp_path / "whole", tmp_path / "empty"
    whole.write_bytes(TEXTS["log"].write(SMALL))
    empty.write_bytes(EMPTY["route-csv"][1])
    with pytest.raises(TraceError, match="no selections in it") as caught:
        moepack.import_trace([str(whole), str(empty)], tmp_path / "out")
    assert caught.value.path == str(empty)
    assert sorted(os.listdir(tmp_path)) == ["empty", "whole"]


# An expert twice.

TELLING = [name for name in ALL if ALL[name].form not in ("counts", "colibri-usage")]
"""All but those that have counts alone."""
TWICE = "an expert twice in one layer of a token"


def first_difference(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, pair in pairs if pair[0] != pair[1]), len(one))


@pytest.mark.parametrize("name", TELLING)
@FEW
@given(data=st.data(), length=st.integers(1, 300))
def test_an_expert_twice_in_a_token_is_named_or_counted_once(
    name: str, data: st.DataObject, length: int, tmp_path: Path
) -> None:
    sample, path = ALL[name], tmp_path / "trace"
    trace = only(data.draw(traces(sample.numbered)), DECODE)
    number = data.draw(st.integers(0, len(calls_of(trace)) - 1))
    layer = data.draw(st.sampled_from(sorted(calls_of(trace)[number].tokens[0])))
    clean = sample.write(trace)
    experts = calls_of(trace)[number].tokens[0][layer]
    experts.append(data.draw(st.sampled_from(experts)))
    written = sample.write(trace)
    again = experts.pop()
    path.write_bytes(written)
    with pieces_of(length):
        error = refused(path)
        _, found, warnings = read(path, lenient=True)
    assert (error.problem, error.found) == (TWICE, f"layer {layer} expert {again}")
    assert found == sample.keeps(trace)
    assert warnings == {TWICE: 1}
    unit, place = str(error.place).rsplit(" ", 1)
    at = first_difference(clean, written)
    if name in TEXTS:
        assert unit == "line"
        line = written.splitlines()[int(place) - 1].decode()
        assert int(place) in (written.count(b"\n", 0, at) + 1, clean.count(b"\n", 0, at) + 1 + 1)
        assert str(again) in line
    else:
        assert unit == {"mblt": "byte", "moepack": "record at byte"}[name]
        assert int(place) == at - 4 if name == "mblt" else int(place) <= at


def test_experts_are_told_apart_by_token_in_a_prefill(tmp_path: Path) -> None:
    """Its tokens are written layer by layer, and one after another here."""
    trace: Trace = [[Call(PREFILL, [{3: [1, 2], 5: [4, 6]}, {3: [1, 2], 5: [4, 6]}])]]
    path = tmp_path / "trace"
    for name in TELLING:
        if ALL[name].form in ("expert-log", "moe-flash"):  # they do not tell all of its tokens
            continue
        path.write_bytes(ALL[name].write(trace))
        assert read(path)[1] == ALL[name].keeps(trace)
        clean, wrong = (ALL[name].write(longer(trace, expert)) for expert in (7, 4))
        path.write_bytes(wrong)
        error = refused(path)
        assert (error.problem, error.found) == (TWICE, "layer 5 expert 4")
        if name in TEXTS:
            at = first_difference(clean, wrong)
            assert error.place == f"line {wrong.count(10, 0, at) + 1}"


def longer(trace: Trace, expert: int) -> Trace:
    """Add an expert to the last layer of the second token, and one to the first."""
    first, second = trace[0][0].tokens
    more = [first | {5: [*first[5], 9]}, second | {5: [*second[5], expert]}]
    return [[Call(PREFILL, more)]]


def test_a_layer_that_a_token_meets_twice_has_each_expert_once(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    log = "---token\nlayer 1 expert 5\nlayer 2 expert 5\nlayer 1 expert {}\n---token\n"
    path.write_text(log.format(6))
    assert read(path)[1].tokens[0][2] == [(1, 5), (2, 5), (1, 6)]
    path.write_text(log.format(5))
    assert refused(path).place == "line 4"


def test_many_experts_in_a_layer_are_looked_at_as_well(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("0 1 " + " ".join(map(str, range(200))) + "\n")
    assert len(read(path)[1].tokens[0][2]) == 200
    path.write_text("0 1 " + " ".join(map(str, [*range(200), 7])) + "\n")
    assert refused(path, form="potatomaxx").found == "layer 1 expert 7"


@pytest.mark.parametrize(
    "data",
    [
        npy(np.array([[[1, 2]], [[3, 3]]])),
        npz(topk_ids_of_layer=np.array([[[1, 2], [3, 3]]])),
        json.dumps({"routed_experts": [[[1, 2]], [[3, 3]]]}).encode(),
    ],
)
@pytest.mark.parametrize("length", [1, 100])
def test_arrays_have_no_expert_twice(data: bytes, length: int, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pieces_of(length):
        error = refused(path)
        assert error.problem == TWICE
        assert str(error.place).endswith("token 1")
        assert [one[2] for one in read(path, lenient=True)[1].tokens] == [
            [(0, 1), (0, 2)], [(0, 3)],
        ]  # fmt: skip


# Numbers beyond 64 bits.

LARGE = "9223372036854775808"
LARGE_LINES = {
    "log": "layer 7 expert {}",
    "moe-flash": "moe-flash: layer   7 topk=[3,{}]",
    "anemll": '{{"seq":0,"layer":3,"n_expert_used":1,"n_tokens":1,"experts":[{}],"slots":[]}}',
    "mer": '{{"token":0,"layer":1,"experts":[{}]}}',
    "mer with spaces": '{{"token": 0, "layer": {}, "experts": [3]}}',
    "route-csv": "0,1,0,3,0,{},0.25,1,4096",
    "call-csv": "0,0,{},0,1",
    "counts": "1,{},3",
    "selections": "1,{}",
    "colibri-usage": "1 {} 3",
    "colibri-route": "0 0 3 {}:0.5",
    "potatomaxx": "0 3 {}",
}


@pytest.mark.parametrize("name", LARGE_LINES)
@pytest.mark.parametrize("number", [LARGE, "1" + "0" * 40])
def test_a_number_beyond_64_bits_is_shown_as_it_stands(
    name: str, number: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    written = TEXTS[name].write(SMALL)
    path.write_bytes(written + LARGE_LINES[name].format(number).encode() + b"\n")
    for shape in (None, shape_of(SMALL)):
        error = refused(path, shape=shape)
        assert error.place == f"line {written.count(10) + 1}"
        assert number in str(error.found)
        assert "-1" not in str(error.found)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (f"[[[1, {LARGE}]]]".encode(), LARGE),
        (f"[[[-1, {LARGE}]]]".encode(), LARGE),
        (f'{{"routed_experts": [[[1{LARGE}]]]}}'.encode(), f"1{LARGE}"),
        (f'{{"layers": [{{"layer": 3, "heat": [1, {LARGE}]}}]}}'.encode(), LARGE),
        (npy(np.array([[[1, int(LARGE)]]], np.uint64)), LARGE),
        (npz(logical_count=np.array([[[1, int(LARGE)]]], np.uint64)), LARGE),
    ],
)
def test_arrays_with_a_number_beyond_64_bits(data: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    assert str(refused(path).found) == found


COUNTS: dict[str, Callable[[list[int]], bytes]] = {
    "colibri-usage": lambda counts: "".join(f"0 {n} {c}\n" for n, c in enumerate(counts)).encode(),
    "counts": lambda counts: "".join(f"0,{n},{c}\n" for n, c in enumerate(counts)).encode(),
    "json": lambda counts: json.dumps({"layers": [{"layer": 0, "heat": counts}]}).encode(),
    "npz": lambda counts: npz(logical_count=np.array([[[c] for c in counts]]).swapaxes(1, 2)),
}


@pytest.mark.parametrize("form", COUNTS)
def test_counts_are_exact_up_to_63_bits(form: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for counts in ([(1 << 53) + 1, 5], [1 << 62, (1 << 62) - 1], [MAX_COUNT]):
        path.write_bytes(COUNTS[form](counts))
        _, found, _ = read(path, form=form)
        found_counts = {key[1:]: count for key, count in found.counts.items()}
        assert found_counts == {(0, n): count for n, count in enumerate(counts)}
        hotness = moepack.measure_hotness([str(path)], options=registry.ReadOptions(form)).hotness
        assert hotness.counts == {(0, n): count for n, count in enumerate(counts)}


@pytest.mark.parametrize("form", [*COUNTS][:3])
def test_a_count_beyond_63_bits_is_refused(form: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(COUNTS[form]([5, MAX_COUNT + 1]))
    error = refused(path, form=form)
    assert error.place is not None
    assert str(error.found) == str(MAX_COUNT + 1)


def test_arrays_of_counts_whose_sums_pass_63_bits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    for counts, is_right in (([1 << 62, (1 << 62) - 1], True), ([1 << 62, 1 << 62], False)):
        path.write_bytes(npz(logical_count=np.array([[[count]] for count in counts])))
        if is_right:
            assert read(path)[1].counts == {(0, 0, 0): sum(counts)}
        else:
            assert refused(path).problem == "counts out of bounds"


def test_totals_of_counts_pass_64_bits_in_a_trace_and_are_no_hotness(tmp_path: Path) -> None:
    path, out = tmp_path / "usage", tmp_path / "out"
    path.write_bytes(COUNTS["colibri-usage"]([MAX_COUNT] * 3))
    options = registry.ReadOptions("colibri-usage")
    summary = moepack.import_trace([str(path)], out, options=options)
    assert summary.counted_selection_count == 3 * MAX_COUNT
    for measure in (
        lambda: moepack.measure_hotness([str(path)], options=options),
        lambda: moepack.measure_hotness([str(out)]),
        lambda: measuring.load(str(out)),
    ):
        with pytest.raises(TraceError, match="counts that add up to too many") as caught:
            measure()
        assert caught.value.path in (str(path), str(out))
        assert caught.value.expected == f"<= {MAX_COUNT:,} in all"


# Lines.


@pytest.mark.parametrize("name", TEXTS)
@FEW
@given(
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    before=st.sampled_from([b"", b" ", b"\t ", b"  "]),
    behind=st.sampled_from([b"", b" ", b"\t", b"  \t"]),
    length=st.integers(1, 300),
)
def test_lines_may_end_in_any_way_and_have_blanks_around_them(
    name: str, end: bytes, before: bytes, behind: bytes, length: int, tmp_path: Path
) -> None:
    sample, path = TEXTS[name], tmp_path / "trace"
    lines = sample.write(SMALL).splitlines()
    path.write_bytes(b"".join(before + line + behind + end for line in lines))
    with pieces_of(length):
        _, found, warnings = read(path)
    assert found == sample.keeps(SMALL)
    assert not warnings


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_line_is_named_by_its_number_whatever_ends_lines(end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(end.join([b"layer 1 expert 2 ", b"", b"\tlayer 3 expert 70000", b""]))
    for length in (1, 2, 3, 100):
        with pieces_of(length):
            assert refused(path).place == "line 3"


def test_a_last_line_that_ends_with_a_carriage_return_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"0,1\r0,2\r")
    assert sum(read(path)[1].counts.values()) == 2
    path.write_bytes(b"0,1\r0,x\r")
    assert refused(path, form="counts").problem == "not a count"
    path.write_bytes(b"layer 1 expert 2\rlayer 1 exp")
    assert refused(path, form="expert-log").problem == "the last line is cut short"


@pytest.mark.parametrize("name", TEXTS)
def test_joined_files_may_each_begin_with_a_byte_order_mark(name: str, tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    path = tmp_path / "trace"
    path.write_bytes(TEXTS[name].write(SMALL) * 2)
    expected = read(path, form=TEXTS[name].form)[1]
    path.write_bytes((mark + TEXTS[name].write(SMALL)) * 2)
    for length in (1, 2, 3, 50):
        with pieces_of(length):
            assert read(path)[1] == expected


def test_binaries_are_no_lines(tmp_path: Path) -> None:
    """Bytes of theirs that look like line ends or blanks are left alone."""
    trace: Trace = [[Call(DECODE, [{3: [13, 10, 32], 9: [0x0D0A, 0x2020]}])]]
    path = tmp_path / "trace"
    for sample in BINARIES.values():
        path.write_bytes(sample.write(trace))
        assert read(path)[1] == sample.keeps(trace)
