"""Statements of files about their model are compared with their selections, and with the model."""

from pathlib import Path

import pytest

import moepack
from moepack.common.errors import TraceError
from moepack.traces.hotness.file import save
from tests.support.models import FIXTURES
from tests.support.shapes import shape_of_counts
from tests.support.trace_samples import (
    ALL,
    DECODE,
    SMALL,
    TEXTS,
    Call,
    Trace,
    counted,
    pieces_of,
    read,
    refused,
    seen,
    shape_of,
)

BEYOND = "not of the model that the file says it is of"
WRITTEN = {name: ALL[name].write(SMALL) for name in ALL}


# SMALL has layers 3 to 5, and experts up to 1023, up to 3 of them in a layer of a token.
@pytest.mark.parametrize(
    ("right", "less", "expected"),
    [
        (b"n_layer=6", b"n_layer=5", "layers below 5"),
        (b"n_expert=1024", b"n_expert=9", "experts below 9"),
    ],
)
def test_what_a_file_says_of_its_model_is_held_against_its_selections(
    right: bytes, less: bytes, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    data = WRITTEN["route-csv"].replace(right, less, 1)
    path.write_bytes(data)
    error = refused(path)
    assert error.problem == BEYOND
    assert expected in str(error.expected)
    line = data.splitlines()[int(str(error.place).split()[1]) - 1].decode()
    assert all(number in line for number in str(error.found).split()[1::2])
    for length in (3, 60, 1 << 19):
        with pieces_of(length):
            assert refused(path).place == error.place
            _, content, warnings = read(path, lenient=True)
    assert warnings.keys() == {BEYOND}
    side, limit = "layers" not in expected, int(expected.split()[-1])
    pairs = {pair for one in content.tokens for pair in one[2]}
    assert pairs == {key[1:] for key in counted(SMALL) if key[1:][side] < limit}


def test_it_is_held_against_the_model_that_is_given(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(WRITTEN["route-csv"])
    right = shape_of(SMALL)
    assert read(path, right)[1] == ALL["route-csv"].keeps(SMALL)
    error = refused(path, shape=dict.fromkeys(right, 2000), lenient=True)
    assert error.problem == "the file is of a model with other experts a layer"
    assert (error.expected, error.found) == (2000, 1024)
    assert error.place is not None
    error = refused(path, shape=dict.fromkeys(range(40), 1024))
    assert error.problem == "the file is of a model with other layers"


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


def test_joined_files_are_of_one_model(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    written = WRITTEN["route-csv"]
    path.write_bytes(written * 2)
    assert read(path)[1] == seen(SMALL * 2), "as more requests"
    path.write_bytes(written + written.replace(b"1024", b"2048"))
    for length in (7, 1 << 19):
        with pieces_of(length):
            error = refused(path, lenient=True)
            assert error.problem == "the file states another model than those before"
            assert "experts below 1024" in str(error.expected)
            assert "experts below 2048" in str(error.found)
            at = written.count(b"\n") + written[: written.index(b"1024")].count(b"\n") + 1
            assert error.place == f"line {at}"


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


def test_the_lengths_that_traces_state_are_those_of_the_working_set(tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    rows = "turn,phase,step,layer,slot,expert,x\n"
    rows += "".join(f"0,1,{step},3,0,{step % 4},0\n" for step in range(20))
    path.write_text(rows)
    assert not moepack.trace_statistics([str(path)]).has_lengths
    path.write_text(f"# model=m n_layer=4 n_expert=4\n# layer=3 expert_bytes=100\n{rows}")
    facts = moepack.trace_statistics([str(path)], window=4)
    assert facts.has_lengths
    assert (facts.working_set[-1].length, facts.working_set[-1].new_length) == (400, 0)
