"""Rules of all formats: nothing in it, an expert twice, numbers, lines, statements of models."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moepack
from conformance import make_traces
from moepack.common.errors import TraceError
from moepack.traces.formats import registry
from moepack.traces.hotness import measure as measuring
from moepack.traces.hotness.file import save
from moepack.traces.model import MAX_COUNT
from tests.support.models import FIXTURES
from tests.support.shapes import shape_of_counts
from tests.support.trace_samples import (
    ALL,
    DECODE,
    FEW,
    SMALL,
    TEXTS,
    Call,
    Trace,
    counted,
    only,
    pieces_of,
    read,
    refused,
    seen,
    shape_of,
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
    with pytest.raises(TraceError, match="no selections in it"):
        moepack.import_trace([str(path)], target, options=registry.ReadOptions(form))
    assert os.listdir(tmp_path) == ["trace"]


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

TELLING = [name for name in ALL if "tokens" not in ALL[name].unknown]
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


def test_a_call_of_more_selections_than_any_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moepack.traces.formats.lines.MAX_CALL_SELECTIONS", 8)
    path = tmp_path / "trace"
    heading = "decode_call,token_in_call,layer,occurrence,experts\n"
    for length in (40, 1000):
        with pieces_of(length):
            path.write_text(heading + "".join(f"{call},0,1,0,1 2 3 4\n" for call in range(9)))
            assert len(read(path)[1].tokens) == 9
            path.write_text(heading + "".join(f"0,{token},1,0,1 2 3 4\n" for token in range(3)))
            assert "too many selections" in refused(path).problem


# Numbers beyond 64 bits.


def test_totals_of_counts_pass_64_bits_in_a_trace_and_are_no_hotness(tmp_path: Path) -> None:
    paths, out = [tmp_path / f"{expert}.csv" for expert in range(3)], tmp_path / "out"
    for expert, path in enumerate(paths):
        path.write_text(f"layer,expert,count\n0,{expert},{MAX_COUNT}\n")
    summary = moepack.import_trace(paths, out)
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


# Statements of files about their model are compared with their selections, and with the model.

BEYOND = "not of the model that the file says it is of"
WRITTEN = {name: ALL[name].write(SMALL) for name in ALL}


def test_what_a_file_says_of_its_model_is_held_against_its_selections(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    data = WRITTEN["route-csv"].replace(b"n_expert=1024", b"n_expert=9", 1)
    path.write_bytes(data)
    error = refused(path)
    assert (error.problem, error.expected) == (BEYOND, "9 experts in layer 3")
    line = data.splitlines()[int(str(error.place).split()[1]) - 1].decode()
    assert all(number in line for number in str(error.found).split()[1::2])
    with pieces_of(60):
        _, content, warnings = read(path, lenient=True)
    assert warnings.keys() == {BEYOND}
    pairs = {pair for one in content.tokens for pair in one[2]}
    assert pairs == {key[1:] for key in counted(SMALL) if key[2] < 9}


def test_it_is_held_against_the_model_that_is_given(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(WRITTEN["route-csv"])
    right = shape_of(SMALL)
    assert read(path, right)[1] == ALL["route-csv"].keeps(SMALL)
    error = refused(path, shape=dict.fromkeys(right, 2000), lenient=True)
    assert error.problem == "the file is of a model with other experts a layer"
    assert (error.expected, error.found) == (2000, 1024)
    assert error.place is not None


def test_a_route_may_use_as_many_experts_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace: Trace = [[Call(DECODE, [{3: [5, 6, 7, 8], 5: [1]}])]]
    written = TEXTS["route-csv"].write(trace)
    path.write_bytes(written)
    assert read(path)[1] == TEXTS["route-csv"].keeps(trace)
    path.write_bytes(written.replace(b"n_expert_used=4", b"n_expert_used=3"))
    error = refused(path)
    assert error.problem == "more experts in one layer of a token than the file says"
    assert (error.place, error.expected, error.found) == ("line 7", "<= 3", "layer 3 expert 8")
    _, content, warnings = read(path, lenient=True)
    assert content.tokens[0][2] == [(3, 5), (3, 6), (3, 7), (5, 1)]
    assert warnings == {error.problem: 1}


def test_joined_files_are_more_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(WRITTEN["route-csv"] * 2)
    assert read(path)[1] == seen(SMALL * 2)


# What a file says goes with its selections, to whoever judges them and into other files.


def test_a_trace_file_keeps_what_an_imported_file_says(tmp_path: Path) -> None:
    path, target = tmp_path / "trace", tmp_path / "own"
    path.write_bytes(WRITTEN["route-csv"])
    moepack.import_trace([str(path)], target)
    assert read(target)[:2] == read(path)[:2]


def test_a_hotness_file_keeps_what_its_traces_say(tmp_path: Path) -> None:
    path, saved = tmp_path / "trace", tmp_path / "hot.csv"
    path.write_bytes(WRITTEN["route-csv"])
    hotness = moepack.measure_hotness([str(path)]).hotness
    save(hotness, saved)
    assert read(saved)[0][0].expert_count == 1024
    hotness.check_fits(shape_of_counts(shape_of(SMALL)))
    with pytest.raises(TraceError, match=r"counted on another model, expected 2000 experts"):
        hotness.check_fits(shape_of_counts(dict.fromkeys(shape_of(SMALL), 2000)))


def test_a_hotness_file_keeps_what_an_imatrix_says_of_each_layer(tmp_path: Path) -> None:
    """It has all experts of a layer, even those without any selection."""
    imatrix, saved = FIXTURES / "qwen3moe-imatrix.gguf", tmp_path / "hot.csv"
    assert read(imatrix)[0][0].expert_counts == {0: 16, 1: 16}
    save(moepack.measure_hotness([str(imatrix)]).hotness, saved)
    assert read(saved)[0][0].expert_counts == {0: 16, 1: 16}
    error = refused(saved, shape={0: 16, 1: 32})
    assert error.problem == "the file is of a model with other experts in layer 1"
    data = saved.read_text()
    saved.write_text(data + data.replace('"1": 16', '"1": 17'))
    assert read(saved)[0][0].expert_counts is None, "two models, counted together"


@pytest.mark.parametrize("value", ['"x"', "[3]", "{}", '{"0": "16"}', '{"x": 16}', "null"])
def test_what_a_hotness_file_cannot_mean_tells_nothing(value: str, tmp_path: Path) -> None:
    path = tmp_path / "hot.csv"
    path.write_text(f'# origin={{"expert_counts": {value}, "expert_count": {value}}}\n0,1,5\n')
    (origin,) = read(path)[0]
    assert (origin.expert_counts, origin.expert_count) == (None, None)
