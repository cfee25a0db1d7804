"""Rules that are one for all formats: nothing in it, an expert twice, numbers, lines."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moepack
from conformance import make_traces
from moepack.common.errors import TraceError
from moepack.traces.formats import registry
from moepack.traces.hotness import measure as measuring
from moepack.traces.model import MAX_COUNT
from tests.support.trace_samples import (
    ALL,
    DECODE,
    FEW,
    SMALL,
    TEXTS,
    Call,
    Trace,
    npy,
    npz,
    only,
    pieces_of,
    read,
    refused,
    tokens_of,
    traces,
)

# Nothing in it.

EMPTY: dict[str, tuple[str, bytes]] = {
    "log": ("expert-log", b"main: model loaded\n---began prompt processing---\n---token\n"),
    "route-csv": ("route-csv", b"turn,phase,step,layer,slot,expert,weight\n"),
    "call-csv": ("call-csv", b"decode_call,token_in_call,layer,occurrence,experts\n"),
    "second routers": (
        "call-csv", b"decode_call,token_in_call,layer,occurrence,experts\n0,0,1,1,5\n"
    ),
    "counts": ("counts", b"# tokens=5\nlayer,expert,count\n"),
    "counts of 0": ("counts", b"layer,expert,count\n0,0,0\n0,1,0\n"),
    "held out": ("counts", b"layer,expert,count,held_out\n"),
    "selections": ("counts", b"layer,expert\n"),
    "moepack": ("moepack", make_traces.file(make_traces.origin())),
    "npy": ("npy", npy(np.zeros((0, 2, 2), np.int32))),
    "npy of padding": ("npy", npy(np.full((3, 2, 2), -1))),
    "npz": ("npz", npz(logical_count=np.zeros((2, 2, 2), np.int32))),
    "npz without arrays": ("npz", b"PK\5\6" + bytes(18)),
    "json": ("json", b'{"routed_experts": []}'),
    **{f"an empty {form}": (form, b"") for form in registry.NAMES},
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


def test_what_is_left_of_a_file_of_faults_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"layer 70000 expert 1\nlayer 1 expert 70000\n")
    assert refused(path, lenient=True).found == "none, and 2 left out"


# Layers in another order.

IN_REVERSE: Trace = [
    [Call(call.phase, [dict(reversed(token.items())) for token in call.tokens]) for call in calls]
    for calls in SMALL
]


@pytest.mark.parametrize("name", ["log", "log without prompts", "route-csv", "call-csv"])
def test_the_layers_of_a_token_are_put_in_order(name: str, tmp_path: Path) -> None:
    """In whatever reads a trace, and in the file that an import writes."""
    sample = TEXTS[name]
    (tmp_path / "trace").write_bytes(sample.write(IN_REVERSE))
    (tmp_path / "right").write_bytes(sample.write(SMALL))
    right = read(tmp_path / "right")[1]
    assert read(tmp_path / "trace")[1] == right
    moepack.import_trace([str(tmp_path / "trace")], tmp_path / "imported")
    assert read(tmp_path / "imported")[1] == right


@pytest.mark.parametrize("lenient", [False, True])
def test_a_trace_file_with_layers_in_another_order_is_refused(lenient: bool) -> None:
    error = refused(make_traces.FOLDER / "broken-layers-fall.moetrace", lenient=lenient)
    assert error.problem == "layers that fall within a token"
    assert error.place == "record at byte 194"
    assert str(error.hint).startswith("import the file again")


# An expert twice.

TELLING = [name for name in ALL if ALL[name].form != "counts"]
"""Formats with tokens."""
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
    trace = data.draw(traces(sample.numbered))
    if sample.form == "expert-log":  # it does not tell the tokens of a prefill apart
        trace = only(trace, DECODE)
    token = data.draw(st.sampled_from(tokens_of(trace)))
    layer = data.draw(st.sampled_from(sorted(token)))
    clean = sample.write(trace)
    experts = token[layer]
    experts.append(data.draw(st.sampled_from(experts)))
    written = sample.write(trace)
    again = experts.pop()
    path.write_bytes(written)
    with pieces_of(length):
        error = refused(path)
        _, content, warnings = read(path, lenient=True)
    assert (error.problem, error.found) == (TWICE, f"layer {layer} expert {again}")
    assert content == sample.keeps(trace)
    assert warnings == {TWICE: 1}
    unit, place = str(error.place).rsplit(" ", 1)
    at = first_difference(clean, written)
    if name in TEXTS:
        assert unit == "line"
        line = written.splitlines()[int(place) - 1].decode()
        assert int(place) in (written.count(b"\n", 0, at) + 1, clean.count(b"\n", 0, at) + 1 + 1)
        assert str(again) in line
    else:
        assert unit == "record at byte"
        assert int(place) <= at


def test_a_layer_that_a_token_meets_twice_has_each_expert_once(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    log = "---token\nlayer 1 expert 5\nlayer 2 expert 5\nlayer 1 expert {}\n---token\n"
    path.write_text(log.format(6))
    assert read(path)[1].tokens[0][2] == [(1, 5), (1, 6), (2, 5)]
    path.write_text(log.format(5))
    assert refused(path).place == "line 4"


def test_many_experts_in_a_layer_are_looked_at_as_well(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    heading = "decode_call,token_in_call,layer,occurrence,experts\n"
    path.write_text(f"{heading}0,0,1,0,{' '.join(map(str, range(200)))}\n")
    assert len(read(path)[1].tokens[0][2]) == 200
    path.write_text(f"{heading}0,0,1,0,{' '.join(map(str, [*range(200), 7]))}\n")
    assert refused(path).found == "layer 1 expert 7"


@pytest.mark.parametrize(
    "data",
    [
        npy(np.array([[[1, 2]], [[3, 3]]])),
        npz(topk_ids_of_layer=np.array([[[1, 2], [3, 3]]])),
        json.dumps({"routed_experts": [[[1, 2]], [[3, 3]]]}).encode(),
    ],
)
def test_arrays_have_no_expert_twice(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pieces_of(1):
        error = refused(path)
        assert error.problem == TWICE
        assert str(error.place).endswith("token 1")
        assert [one[2] for one in read(path, lenient=True)[1].tokens] == [
            [(0, 1), (0, 2)], [(0, 3)],
        ]  # fmt: skip


# Numbers beyond 64 bits.


def test_totals_of_counts_pass_64_bits_in_a_trace_and_are_no_hotness(tmp_path: Path) -> None:
    path, out = tmp_path / "counts.npz", tmp_path / "out"
    path.write_bytes(npz(logical_count=np.full((1, 1, 3), MAX_COUNT)))
    summary = moepack.import_trace([str(path)], out)
    assert summary.counted_selection_count == 3 * MAX_COUNT
    with pytest.raises(TraceError, match=f"^{out}: counts that add up to too many"):
        measuring.load(str(out))


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
        _, content, warnings = read(path)
    assert content == sample.keeps(SMALL)
    assert not warnings


def test_a_last_line_that_ends_with_a_carriage_return_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"0,1\r0,2\r")
    assert sum(read(path)[1].counts.values()) == 2
    path.write_bytes(b"0,1\r0,x\r")
    assert refused(path, form="counts").problem == "not a count"
    path.write_bytes(b"layer 1 expert 2\rlayer 1 exp")
    assert refused(path, form="expert-log").problem == "the last line is cut short"
