"""The converters in contrib/: every format becomes a trace file that says the same."""

import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrib import convert_trace
from contrib.convert_trace import FORMATS, convert
from moepack.common.errors import MoepackError, TraceError
from moepack.traces.formats import registry
from tests.support.hostile_input import refused_by
from tests.support.trace_forms import FEW, PACKINGS, SMALL
from tests.support.trace_samples import (
    DECODE,
    PREFILL,
    UNKNOWN,
    Call,
    Seen,
    Trace,
    by_layer,
    calls_of,
    counted,
    dimensions,
    packed,
    read,
    seen,
    tokens_of,
    traces,
)


def _text(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _moe_flash(trace: Trace) -> bytes:
    layers, experts = dimensions(trace)
    lines = [f"moe-flash: loaded manifest: {layers} layers, {experts} experts/layer"]
    for call in calls_of(trace):
        count = len(call.tokens)
        for layer, rows in by_layer(call):
            behind = f" ({count} tokens)" if count > 1 else ""
            lines.append(
                f"moe-flash: layer {layer:3d} topk=[{','.join(map(str, rows[0]))}]{behind}"
            )
        lines.append("llama_perf: 5 tokens, topk=[1,2] layer 3")
    return _text(*lines)


def _anemll(trace: Trace) -> bytes:
    rows: list[dict[str, Any]] = []
    for number, call in enumerate(calls_of(trace)):
        for layer, tokens in by_layer(call):
            experts = [expert for row in tokens for expert in row]
            row = {"seq": number, "layer": layer, "n_expert_used": len(tokens[0])}
            rows.append({**row, "n_tokens": len(tokens), "experts": experts, "slots": experts[:1]})
    return _text(*map(json.dumps, rows))


def _mer(trace: Trace) -> bytes:
    return _text(
        *(
            json.dumps({"token": n, "layer": layer, "experts": experts, "predicted": [1, 2]})
            for n, token in enumerate(tokens_of(trace))
            for layer, experts in token.items()
        )
    )


def _usage(trace: Trace) -> bytes:
    layers, experts = dimensions(trace)
    rows = (f"{layer} {expert} {n}" for (_, layer, expert), n in counted(trace).items())
    return _text(f"-1 {layers - 1} {experts}", "-2 1 9f3a", *rows)


def _gates(trace: Trace) -> bytes:
    return _text(
        *(
            f"{number} {n} {layer} " + " ".join(f"{e}:{('0.25', '1e-05')[e % 2]}" for e in row)
            for number, call in enumerate(calls_of(trace))
            for layer, rows in by_layer(call)
            for n, row in enumerate(rows)
        )
    )


def _potatomaxx(trace: Trace) -> bytes:
    rows = [(n, *one) for n, token in enumerate(tokens_of(trace)) for one in token.items()]
    return _text("# all", *(f"{n} {at} {' '.join(map(str, row))}" for n, at, row in rows))


def _mblt(trace: Trace) -> bytes:
    numbers = [0x544C424D, 1, dimensions(trace)[1]]
    for call in calls_of(trace):
        for layer, rows in by_layer(call):
            numbers += [layer, len(rows[0]), len(rows), *(e for row in rows for e in row)]
    return struct.pack(f"<{len(numbers)}i", *numbers)


def _heat(trace: Trace) -> bytes:
    layers: dict[int, list[int]] = {}
    for (_, layer, expert), count in counted(trace).items():
        layers.setdefault(layer, [0] * dimensions(trace)[1])[expert] = count
    body = [{"layer": 0, "abs_layer": layer, "heat": heat} for layer, heat in layers.items()]
    return json.dumps({"n_decode_tokens": len(tokens_of(trace)), "layers": body}).encode()


def _unnumbered(trace: Trace) -> Seen:
    return seen(trace, False, lambda _: UNKNOWN)


def _by_size(call: Call) -> int:
    return PREFILL if len(call.tokens) > 1 else DECODE


def _sized(trace: Trace) -> Seen:
    return seen(trace, False, _by_size)


def _first_tokens(trace: Trace) -> Seen:
    cut = [[Call(_by_size(call), call.tokens[:1]) for call in one] for one in trace]
    return seen(cut, False)


class Sample(NamedTuple):
    """A format: its writer, the content that it keeps, the facts that it lacks, and a bad row."""

    write: Callable[[Trace], bytes]
    keeps: Callable[[Trace], Seen]
    unknown: set[str]
    bad: bytes
    states_experts: bool = False


_BORDERS = {"requests", "phases"}
SAMPLES = {
    "moe-flash": Sample(
        _moe_flash,
        _first_tokens,
        {"requests", "later tokens"},
        b"moe-flash: layer   7 topk=[3,\n",
        states_experts=True,
    ),
    "anemll": Sample(
        _anemll,
        _sized,
        {"requests"},
        b'{"layer":3,"n_expert_used":2,"n_tokens":1,"experts":[1]}\n',
    ),
    "mer": Sample(_mer, _unnumbered, _BORDERS, b'{"token":true,"layer":1,"experts":[1]}\n'),
    "colibri-usage": Sample(
        _usage,
        lambda trace: Seen([], counted(trace)),
        _BORDERS | {"tokens"},
        b"1 2\n",
        states_experts=True,
    ),
    "colibri-route": Sample(_gates, _unnumbered, _BORDERS, b"0 0 3 5:0.5 7\n"),
    "potatomaxx": Sample(_potatomaxx, _unnumbered, _BORDERS, b"0 3 1 x\n"),
    "mblt": Sample(_mblt, _sized, {"requests"}, struct.pack("<2i", 1, 1), states_experts=True),
    "heat": Sample(
        _heat,
        lambda trace: Seen([], counted(trace, DECODE)),
        {"requests", "tokens"},
        b"]",
    ),
}


def converted(name: str, data: bytes, folder: Path, **options: bool) -> Any:
    """Convert a file; return its origins, its content, and the warnings."""
    path, target = folder / "trace", folder / "trace.moetrace"
    path.write_bytes(data)
    target.unlink(missing_ok=True)
    warnings = convert(name, str(path), str(target), **options)
    return *read(target)[:2], warnings


def refusal(name: str, data: bytes, folder: Path) -> TraceError:
    """Return the error of a file that cannot be converted, which leaves no target behind."""
    path = folder / "trace"
    error = refused_by(TraceError, path, lambda: converted(name, data, folder))
    assert [one.name for one in folder.iterdir()] == ["trace"]
    return error


@pytest.mark.parametrize("name", SAMPLES)
@FEW
@given(trace=traces(numbered=False, wide=False), packing=st.sampled_from(PACKINGS))
def test_a_trace_file_says_what_the_trace_says(
    name: str, trace: Trace, packing: str, tmp_path: Path
) -> None:
    sample = SAMPLES[name]
    origins, content, warnings = converted(name, packed(sample.write(trace), packing), tmp_path)
    assert content == sample.keeps(trace)
    (origin,) = origins
    assert (origin.format, origin.name, origin.unknown) == (name, "trace", sample.unknown)
    assert origin.expert_count == (dimensions(trace)[1] if sample.states_experts else None)
    assert not warnings


@pytest.mark.parametrize("name", SAMPLES)
def test_a_bad_row_is_named_or_left_out_and_counted(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    written = sample.write(SMALL)
    error = refusal(name, written + sample.bad, tmp_path)
    if name == "heat":
        assert error.problem == "not the heat of mbolt"
        return
    at = f"byte {len(written)}" if name == "mblt" else f"line {written.count(10) + 1}"
    assert error.place == at
    _, content, warnings = converted(name, written + sample.bad, tmp_path, lenient=True)
    assert content == sample.keeps(SMALL)
    assert warnings.total() == 1


@pytest.mark.parametrize("name", SAMPLES)
def test_rows_are_put_together_over_the_borders_of_chunks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 2, 3):
        monkeypatch.setattr(convert_trace, "_ROWS_AT_ONCE", count)
        assert converted(name, SAMPLES[name].write(SMALL), tmp_path)[1] == SAMPLES[name].keeps(
            SMALL
        )


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"colibri-usage", "heat"}))
def test_an_expert_twice_in_a_token_is_named(name: str, tmp_path: Path) -> None:
    trace: Trace = [[Call(DECODE, [{3: [1, 2], 5: [4, 4]}]), Call(DECODE, [{3: [1], 5: [2]}])]]
    error = refusal(name, SAMPLES[name].write(trace), tmp_path)
    assert error.problem == "an expert twice in one layer of a token"
    assert error.found == "layer 5 expert 4"
    assert error.place is not None


@pytest.mark.parametrize("name", [name for name in SAMPLES if SAMPLES[name].states_experts])
def test_selections_are_held_against_what_the_file_says_of_its_model(
    name: str, tmp_path: Path
) -> None:
    right, less = (struct.pack("<i", n) if name == "mblt" else b"%d" % n for n in (1024, 1023))
    written = SAMPLES[name].write(SMALL)
    error = refusal(name, written.replace(right, less, 1), tmp_path)
    assert error.problem == "not of the model that the file says it is of"
    assert error.found == "layer 3 expert 1023"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("mblt", b"MBLT\1\0\0\0"),
        ("mblt", struct.pack("<3i", 0x544C424D, 2, 8)),
        *(
            ("mblt", struct.pack(f"<{3 + len(rest)}i", 0x544C424D, 1, 8, *rest))
            for rest in ([2, 0, 1, 5], [2, 1, -1, 5], [2, 1, 1 << 24, 5], [-2, 1, 1, 5], [])
        ),
        ("mblt", struct.pack("<6i", 0x544C424D, 1, 0, 3, 1, 1)),
        ("colibri-usage", b"-1 48 0\n0 1 2\n"),
        ("colibri-usage", b"-1 48 128\n49 127 5\n"),
        ("colibri-usage", b"1 70000 3\n"),
        ("colibri-usage", b"1 7 9223372036854775808\n"),
        ("mer", b"[" * 5000 + b"\n"),
        ("mer", b'{"token":0,"layer":1,"experts":[]}\n'),
        ("potatomaxx", b""),
        ("potatomaxx", b"1 2 99999\n"),
        *(("heat", json.dumps(document).encode()) for document in (
            5, {}, {"layers": []}, {"layers": [5]}, {"layers": [{"layer": 0, "heat": 5}]},
            {"layers": [{"layer": "1", "heat": [1]}]}, {"layers": [{"layer": 1, "heat": [-1]}]},
            {"layers": [{"layer": 1, "heat": [1.5]}]}, {"layers": [{"layer": 1, "heat": []}]},
            {"layers": [{"layer": 70000, "heat": [1]}]}, {"layers": [{"layer": 0, "heat": [0]}]},
            {"layers": [{"layer": 1, "heat": [1 << 63]}]},
            *({"layers": [{"layer": 3, "heat": [5, 1]}], **fields} for fields in (
                {"n_layers": 3}, {"n_expert_per_layer": 3}, {"n_decode_tokens": 4},
                {"profile_rows": {"decode_rows": 4}}, {"n_decode_tokens": 5, "k": 1}, {"k": "x"},
            )),
        )),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(name: str, data: bytes, tmp_path: Path) -> None:
    refusal(name, data, tmp_path)


def test_heat_states_its_model_and_its_tokens(tmp_path: Path) -> None:
    layers = [{"abs_layer": 3, "layer": 0, "heat": [1, 2, 0]}]
    document = {"model": "m", "profile_rows": {"decode_rows": 7}, "k": 2, "n_layers": 1}
    data = json.dumps(document | {"layers": layers}).encode()
    (origin,), content, _ = converted("heat", data, tmp_path)
    assert content.counts == Counter({(DECODE, 3, 0): 1, (DECODE, 3, 1): 2})
    assert (origin.model, origin.token_count, origin.expert_counts) == ("m", 7, {3: 3})


@pytest.mark.parametrize("name", SAMPLES)
def test_moepack_names_the_converter(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(SAMPLES[name].write(SMALL))
    for form in (None, name):
        with pytest.raises(MoepackError, match=f"{name}, which moepack does not read") as caught:
            read(path, form=form)
        assert f"python -m contrib.convert_trace {name} " in str(caught.value.hint)


def test_the_program_converts_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = tmp_path / "trace", tmp_path / "out"
    path.write_bytes(SAMPLES["mer"].write(SMALL) + b"{}\n")
    arguments = ["mer", str(path), str(target)]
    assert convert_trace.main(arguments) == 1
    error = capsys.readouterr().err
    assert "not a line of this format" in error
    assert "hint: `--lenient` leaves out" in error
    assert convert_trace.main([*arguments, "--lenient"]) == 0
    assert capsys.readouterr().err == "left out: 1 x not a line of this format\n"
    assert read(target)[1] == _unnumbered(SMALL)


def test_each_converter_has_a_sample() -> None:
    assert (
        FORMATS.keys()
        == SAMPLES.keys()
        == {one.name for one in registry.FORMATS if one.read is None}
    )
