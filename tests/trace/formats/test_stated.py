"""What a file says of its model is held against what is in it, and against the model."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import moepack
from conformance import make_traces
from moepack.errors import TraceError
from moepack.hotness.file import save
from tests.support.models import FIXTURES
from tests.support.shapes import shape_of_counts
from tests.support.trace_faults import refused
from tests.support.trace_forms import ALL, SMALL, pieces_of
from tests.support.trace_samples import (
    DECODE,
    TEXTS,
    Call,
    Seen,
    Trace,
    counted,
    layers_of,
    mblt,
    read,
    shape_of,
)

BEYOND = "not of the model that the file says it is of"
WRITTEN = {name: ALL[name].write(SMALL) for name in ALL}
# SMALL has layers 3 to 5, and experts up to 1023, up to 3 of them in a layer of a token.
LESS: dict[str, tuple[str, bytes, bytes, str]] = {
    "layers of route-csv": ("route-csv", b"n_layer=6", b"n_layer=5", "layers below 5"),
    "experts of route-csv": ("route-csv", b"n_expert=1024", b"n_expert=9", "experts below 9"),
    "experts of moe-flash": ("moe-flash", b"1024 experts", b"300 experts", "experts below 300"),
    "experts of mblt": (
        "mblt", struct.pack("<i", 1024), struct.pack("<i", 1023), "experts below 1023"
    ),
    "layers of colibri-usage": ("colibri-usage", b"-1 5 1024", b"-1 4 1024", "layers below 5"),
    "experts of colibri-usage": ("colibri-usage", b"-1 5 1024", b"-1 5 1000", "experts below 1000"),
}  # fmt: skip


def stating_less(name: str) -> tuple[str, bytes, str]:
    form, right, less, expected = LESS[name]
    assert right in WRITTEN[form]
    return form, WRITTEN[form].replace(right, less, 1), expected


@pytest.mark.parametrize("name", LESS)
def test_what_a_file_says_of_its_model_is_held_against_its_selections(
    name: str, tmp_path: Path
) -> None:
    form, data, expected = stating_less(name)
    path = tmp_path / "trace"
    path.write_bytes(data)
    error = refused(path)
    assert error.problem == BEYOND
    assert expected in str(error.expected)
    layer, expert = map(int, str(error.found).split()[1::2])
    assert layer == int(expected.split()[-1]) if "layers" in expected else expert >= 9
    unit, place = str(error.place).split()
    if form == "mblt":
        assert unit == "byte"
        numbers = struct.unpack_from("<2i", data, int(place))
        assert numbers == (layer, 2)
    else:
        line = data.splitlines()[int(place) - 1].decode()
        assert str(layer) in line
        assert str(expert) in line
    for length in (3, 60, 1 << 19):
        with pieces_of(length):
            assert refused(path).place == error.place
            _, found, warnings = read(path, lenient=True)
    assert warnings.keys() == {BEYOND}
    pairs = {pair for one in found.tokens for pair in one[2]} | {key[1:] for key in found.counts}
    every = {key[1:] for key in counted(SMALL)}
    side, limit = "layers" not in expected, int(expected.split()[-1])
    kept = {pair for pair in every if pair[side] < limit}
    assert pairs <= kept
    if form != "moe-flash":  # it has the first token of a prefill alone
        assert pairs == kept


@pytest.mark.parametrize("name", ["route-csv", "mblt", "moe-flash", "colibri-usage"])
def test_it_is_held_against_the_model_that_is_given(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(WRITTEN[name])
    right = shape_of(SMALL)
    assert read(path, right)[1] == ALL[name].keeps(SMALL)
    error = refused(path, shape=dict.fromkeys(right, 2000), lenient=True)
    assert error.problem == "the file is of a model with other experts a layer"
    assert (error.expected, error.found) == (2000, 1024)
    assert error.place is not None
    if name in ("route-csv", "colibri-usage"):
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
    _, found, warnings = read(path, lenient=True)
    assert found.tokens[0][2] == [(3, 5), (3, 6), (3, 7), (5, 1)]
    assert warnings == {error.problem: 1}


def test_an_engine_may_use_fewer_experts_than_the_model(tmp_path: Path) -> None:
    """Users set that: a published trace of a model that uses 8 has 6."""
    path = tmp_path / "trace"
    path.write_bytes(WRITTEN["route-csv"])
    assert read(path, shape_of(SMALL))[1] == ALL["route-csv"].keeps(SMALL)


@pytest.mark.parametrize("form", ["route-csv", "moe-flash", "colibri-usage"])
def test_joined_files_are_of_one_model(form: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    written = WRITTEN[form]
    path.write_bytes(written * 2)
    assert read(path)[1]
    path.write_bytes(written + written.replace(b"1024", b"2048"))
    for length in (7, 1 << 19):
        with pieces_of(length):
            error = refused(path, lenient=True)
            assert error.problem == "the file says that it is of another model than before"
            assert "experts below 1024" in str(error.expected)
            assert "experts below 2048" in str(error.found)
            at = written.count(b"\n") + written[: written.index(b"1024")].count(b"\n") + 1
            assert error.place == f"line {at}"


@pytest.mark.parametrize(
    ("form", "data"),
    [
        ("mblt", struct.pack("<4s6i", b"MBLT", 1, 0, 3, 1, 1, 5)),
        ("mblt", struct.pack("<4s6i", b"MBLT", 1, -1, 3, 1, 1, 5)),
        ("mblt", struct.pack("<4s6i", b"MBLT", 1, 1 << 20, 3, 1, 1, 5)),
        ("colibri-usage", b"-1 48 0\n0 1 2\n"),
        ("colibri-usage", b"-1 70000 128\n0 1 2\n"),
    ],
)
def test_dimensions_that_no_model_has(form: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    error = refused(path, form=form)
    assert error.problem == "dimensions that no model has"
    assert error.place == {"mblt": "byte 8", "colibri-usage": "line 1"}[form]


def test_colibri_counts_layers_from_0_with_the_last(tmp_path: Path) -> None:
    """The last is the layer for multi-token prediction."""
    path = tmp_path / "usage"
    path.write_bytes(b"-1 48 128\n-2 1 77\n48 127 5\n")
    assert read(path)[1].counts == {(0, 48, 127): 5}
    path.write_bytes(b"-1 48 128\n-2 1 77\n49 127 5\n")
    assert refused(path).place == "line 3"


# Heat.

BLOCKS = {"abs_layer": 3, "moe_order": 0, "gid_base": 0, "heat": [1, 2]}
"""A layer as the heat of GLM-5.2 has it."""


def heat(path: Path, *layers: dict[str, Any], **fields: Any) -> None:
    path.write_text(json.dumps({"layers": layers, **fields}))


def test_the_block_is_the_layer_of_heat(tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    expected = Seen([], {(DECODE, 3, 0): 1, (DECODE, 3, 1): 2})  # type: ignore[arg-type]
    heat(path, BLOCKS, profile_rows={"decode_rows": 7}, k=2, n_expert_per_layer=2, n_layers=1)
    origins, found, _ = read(path)
    assert found == expected
    assert origins[0].token_count == 7
    for layer in (0, 3, "x"):
        heat(path, BLOCKS | {"layer": layer})
        assert read(path)[1] == expected
    heat(path, {"layer": 3, "heat": [1, 2]}, n_layers=4)
    assert read(path)[1] == expected
    heat(path, BLOCKS | {"abs_layer": "3"})
    assert refused(path).place == "abs_layer 3"


def test_json_of_unknown_keys_is_told_of_heat(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for document in (
        {"layers": [{"block": 3, "heat": [1]}]},
        {"x": 1},
        {"layers": [{"layer": 3, "heat": [1]}, {"layer": 4}]},
    ):
        path.write_text(json.dumps(document))
        error = refused(path)
        assert "heat: layers, each with layer or abs_layer" in str(error.expected)
        assert error.found == f"an object with {', '.join(document)}"
    path.write_text("{}")
    assert refused(path).found == "an object with nothing"


@pytest.mark.parametrize(
    ("fields", "counts", "problem", "expected", "found"),
    [
        ({"n_layers": 3}, [1], BEYOND, "layers below 3", "layer 3 expert 0"),
        ({"n_expert_per_layer": 2}, [1], "not a count for each expert", "2", "1"),
        ({"n_expert_per_layer": 2}, [1, 1, 0], "not a count for each expert", "2", "3"),
        ({"n_decode_tokens": 5}, [6], "an expert chosen more often than", "<= 5", "6"),
        ({"n_decode_tokens": 5, "k": 2}, [5, 5, 1], "more selections than the tokens make",
         "<= 2 for each of 5 tokens", "11"),
        ({"profile_rows": {"decode_rows": 5}}, [6], "more often than there are", "<= 5", "6"),
    ],
)  # fmt: skip
def test_heat_is_held_against_what_it_says(
    fields: dict[str, Any],
    counts: list[int],
    problem: str,
    expected: str,
    found: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "heat.json"
    heat(path, {"layer": 3, "heat": counts}, **fields)
    error = refused(path)
    assert problem in error.problem
    assert (error.place, str(error.expected), str(error.found)) == ("layer 3", expected, found)
    heat(path, {"layer": 3, "heat": counts}, n_decode_tokens=1 << 63)
    assert refused(path).problem == "a token count out of bounds"
    heat(path, {"layer": 3, "heat": counts})
    assert sum(read(path)[1].counts.values()) == sum(counts)


def test_heat_of_a_model_that_is_given(tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    heat(path, {"layer": 3, "heat": [1, 2]}, n_expert_per_layer=2)
    assert read(path, {3: 2})[1].counts
    with pytest.raises(TraceError, match="other experts a layer"):
        read(path, {3: 4})


# What a file says goes with its selections, to whoever judges them and into other files.

TOLD = ["route-csv", "mblt", "moe-flash", "colibri-usage"]
USED = {"route-csv": 4}
MOST = 1024


@pytest.mark.parametrize("name", TOLD)
def test_an_origin_tells_how_many_experts_its_file_says_there_are(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(WRITTEN[name])
    (origin,) = read(path)[0]
    assert (origin.expert_count, origin.expert_counts) == (MOST, None)
    assert origin.experts_used == USED.get(name)


def test_an_origin_tells_no_more_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for name in sorted(set(ALL) - set(TOLD)):
        path.write_bytes(WRITTEN[name])
        for origin in read(path)[0]:
            assert (origin.expert_count, origin.expert_counts) == (None, None), name


def test_a_trace_file_keeps_what_an_imported_file_says(tmp_path: Path) -> None:
    path, target = tmp_path / "trace", tmp_path / "own"
    for name in TOLD:
        path.write_bytes(WRITTEN[name])
        moepack.import_trace([str(path)], target, force=True)
        assert read(target)[0][0] == read(path)[0][0]
        assert read(target)[1] == read(path)[1]
        error = refused(target, shape=dict.fromkeys(shape_of(SMALL), 2000), lenient=True)
        assert error.problem == "the file is of a model with other experts a layer"
        assert (error.expected, error.found) == (2000, MOST)


def test_a_trace_file_is_held_against_what_it_keeps(tmp_path: Path) -> None:
    path = tmp_path / "own"
    rows = make_traces.tokens((0, DECODE, [(3, 5)]))
    for count, is_right in ((6, True), (5, False), ("5", True), (0, True)):
        path.write_bytes(make_traces.file(make_traces.origin(expert_count=count), rows))
        if is_right:
            assert len(read(path)[1].tokens) == 1, "other keys are ignored"
        else:
            assert refused(path).problem == BEYOND


def test_a_hotness_file_keeps_what_its_traces_say(tmp_path: Path) -> None:
    path, saved = tmp_path / "trace", tmp_path / "hot.csv"
    path.write_bytes(WRITTEN["route-csv"])
    hotness = moepack.measure_hotness([str(path)]).hotness
    save(hotness, saved)
    assert read(saved)[0][0].expert_count == MOST
    hotness.check_fits(shape_of_counts(shape_of(SMALL)))
    with pytest.raises(TraceError, match=r"counted on another model, expected 2000 experts"):
        hotness.check_fits(shape_of_counts(dict.fromkeys(shape_of(SMALL), 2000)))


def test_a_hotness_file_keeps_what_an_imatrix_says_of_each_layer(tmp_path: Path) -> None:
    """It has all experts of a layer, also those that the text never chose."""
    imatrix, saved = FIXTURES / "qwen3moe-imatrix.gguf", tmp_path / "hot.csv"
    assert read(imatrix)[0][0].expert_counts == {0: 16, 1: 16}
    save(moepack.measure_hotness([str(imatrix)]).hotness, saved)
    assert read(saved)[0][0].expert_counts == {0: 16, 1: 16}
    error = refused(saved, shape={0: 16, 1: 32})
    assert error.problem == "the file is of a model with other experts in layer 1"
    data = saved.read_text()
    saved.write_text(data + data.replace('"1": 16', '"1": 17'))
    assert read(saved)[0][0].expert_counts is None, "two models, counted together"


@pytest.mark.parametrize("stated", ['"x"', "[3]", "{}", '{"0": "16"}', '{"x": 16}', "null"])
def test_what_a_hotness_file_cannot_mean_tells_nothing(stated: str, tmp_path: Path) -> None:
    path = tmp_path / "hot.csv"
    path.write_text(f'# origin={{"expert_counts": {stated}, "expert_count": {stated}}}\n0,1,5\n')
    (origin,) = read(path)[0]
    assert (origin.expert_counts, origin.expert_count) == (None, None)


def test_heat_has_a_count_for_each_expert_of_its_layers(tmp_path: Path) -> None:
    path = tmp_path / "heat.json"
    heat(path, {"layer": 3, "heat": [1, 2, 0, 0]}, {"layer": 5, "heat": [0, 1, 0]})
    assert read(path)[0][0].expert_counts == {3: 4, 5: 3}
    with pytest.raises(TraceError, match="other experts in layer 5, expected 4, found 3"):
        read(path, {3: 4, 5: 4})
    heat(path, {"layer": 3, "heat": []}, {"layer": 5, "heat": [1]})
    assert refused(path).problem == "experts that no model has"


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


def test_samples_state_what_they_have() -> None:
    """Else the tests above would change nothing."""
    assert layers_of(SMALL) == [3, 4, 5]
    assert mblt(SMALL)[8:12] == struct.pack("<i", 1024)
