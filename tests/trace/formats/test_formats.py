"""Every format of traces: what is written is read, selection by selection."""

import gzip
import json
import os
import random
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import moepack
from moepack.errors import RequestError, TraceError
from moepack.hotness import measure
from moepack.trace.formats import number_text, registry
from tests.support.models import FIXTURES
from tests.support.trace_forms import ALL, BIG, FEW, PACKINGS, SMALL, npy, npz, pieces_of
from tests.support.trace_samples import (
    DECODE,
    PREFILL,
    TEXTS,
    UNKNOWN,
    Call,
    Seen,
    TokenExperts,
    Trace,
    calls_of,
    counted,
    layers_of,
    only,
    packed,
    read,
    seen,
    shape_of,
    tokens_of,
    traces,
)


@pytest.mark.parametrize("name", ALL)
@FEW
@given(data=st.data(), length=st.integers(1, 300), packing=st.sampled_from(PACKINGS))
def test_what_is_written_is_read(
    name: str, data: st.DataObject, length: int, packing: str, tmp_path: Path
) -> None:
    sample = ALL[name]
    trace = data.draw(traces(sample.numbered))
    shape = shape_of(trace) if data.draw(st.booleans()) else None
    path = tmp_path / f"trace.txt{packing}"
    written = sample.write(trace)
    if name in TEXTS and data.draw(st.booleans()):
        written = written.replace(b"\n", b"\r\n")
    if name in TEXTS and data.draw(st.booleans()):
        written = b"\xef\xbb\xbf" + written
    path.write_bytes(packed(written, packing))
    with pieces_of(length):
        origins, found, warnings = read(path, shape)
    assert found == sample.keeps(trace)
    assert [origin.unknown for origin in origins] == [sample.unknown]
    assert not warnings
    if name != "moepack":
        assert (origins[0].format, origins[0].name) == (sample.form, path.name)


@pytest.mark.parametrize("name", ALL)
def test_tokens_and_lines_may_go_over_every_border_of_pieces(name: str, tmp_path: Path) -> None:
    sample = ALL[name]
    path = tmp_path / "trace"
    path.write_bytes(sample.write(SMALL))
    for length in (*range(1, 12), 13, 17, 19, 23, 29, 31, 37, 64, 97, 200):
        with pieces_of(length):
            assert read(path)[1] == sample.keeps(SMALL), length


@pytest.mark.parametrize("name", ALL)
def test_files_of_several_real_pieces(name: str, tmp_path: Path) -> None:
    sample = ALL[name]
    path = tmp_path / "trace"
    written = sample.write(BIG)
    for packing in PACKINGS:
        path.write_bytes(packed(written, packing))
        with pieces_of(number_text.PIECE_LENGTH if packing else 1 << 13):
            assert read(path)[1] == sample.keeps(BIG)


@pytest.mark.parametrize("name", ALL)
def test_each_is_recognised_whatever_its_name(name: str, tmp_path: Path) -> None:
    sample = ALL[name]
    for packing in PACKINGS:
        path = tmp_path / f"trace.gguf{packing}.npy"
        path.write_bytes(packed(sample.write(SMALL), packing))
        assert registry.recognise(str(path)) == sample.form
        assert read(path, form=sample.form)[1] == sample.keeps(SMALL)


@pytest.mark.parametrize("name", ALL)
def test_pipes_are_read_as_files_are(name: str, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for packing in PACKINGS:
        data = packed(ALL[name].write(SMALL), packing)
        writer = Thread(target=path.write_bytes, args=(data,))
        writer.start()
        assert read(path)[1] == ALL[name].keeps(SMALL)
        writer.join()


def test_each_format_has_a_sample() -> None:
    others = {"npy", "npz", "json", "imatrix"}
    assert {sample.form for sample in ALL.values()} | others == set(registry.NAMES)


# Logs.


def noisy(log: bytes, rng: random.Random) -> bytes:
    others = [
        b"slot print_timing: id  0 | task 0 | eval time = 12 ms / layer 3 expert 4",
        b"layer 3 expert 4 was slow", b"layer 3 experts 4", b"layer", b"",
        b"--- token 3", b"moe: layer 3 expert 4", b"layer 3  expert 4", b"12", b"layer 3 expert",
        b"---", b"x\xff\xfe \xc3\x28", b"x" * 300,
    ]  # fmt: skip
    lines = [b"%s\n" % line for line in log.split(b"\n")[:-1]]
    return b"".join(
        b"".join([*(b"%s\n" % rng.choice(others) for _ in range(rng.randint(0, 2))), line])
        for line in lines
    )


@pytest.mark.parametrize("name", ["log", "log without token lines", "log without prompts"])
@FEW
@given(data=st.data(), seed=st.integers(0, 999), length=st.integers(1, 400))
def test_other_lines_of_a_log_are_ignored(
    name: str, data: st.DataObject, seed: int, length: int, tmp_path: Path
) -> None:
    trace = data.draw(traces(TEXTS[name].numbered))
    path = tmp_path / "server.log"
    path.write_bytes(noisy(TEXTS[name].write(trace), random.Random(seed)))
    with pieces_of(length):
        assert read(path)[1] == TEXTS[name].keeps(trace)


def test_a_token_line_may_be_the_first_or_come_twice(tmp_path: Path) -> None:
    log = b"---token a\n---token b\nlayer 1 expert 2\n---token\n---token\nlayer 1 expert 3\n"
    path = tmp_path / "log"
    path.write_bytes(log)
    assert read(path)[1].tokens == [(0, UNKNOWN, [(1, 2)]), (0, UNKNOWN, [(1, 3)])]


def test_token_lines_far_behind_the_head_are_found(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [f"layer {layer} expert {layer}" for layer in (*range(200), *range(100, 200))]
    log = "\n".join([*lines[:200], "---token 1", *lines[200:], ""])
    path.write_text(log)
    with pieces_of(100):
        tokens = read(path)[1].tokens
    assert [len(one[2]) for one in tokens] == [200, 100]


# Tables.


def test_rows_of_a_second_router_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    heading = "decode_call,token_in_call,layer,occurrence,experts\n"
    path.write_text(heading + "0,0,1,0,3 4\n0,0,1,1,5\n0,0,2,0,6\n1,0,1,1,7\n")
    _, found, warnings = read(path)
    assert found.tokens == [(0, UNKNOWN, [(1, 3), (1, 4), (2, 6)])]
    assert warnings == {"rows of a layer's second router": 2}


def test_tables_say_their_model_and_their_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(TEXTS["counts"].write(SMALL))
    assert read(path)[0][0].token_count == len(tokens_of(SMALL))
    path.write_bytes(TEXTS["route-csv"].write(SMALL))
    assert read(path, shape_of(SMALL))[0][0].model == "tiny.gguf"
    with pytest.raises(TraceError, match="a model with other experts"):
        read(path, dict.fromkeys(range(6), 128))
    with pytest.raises(TraceError, match="a model with other layers"):
        read(path, dict.fromkeys(range(40), 1024))


def test_files_of_counts_that_were_joined_add_up(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    parts = [b"layer,expert,count\n0,0,5\n1,1,1\n", b"layer,expert,count\r\n0,0,6\r\n"]
    expected = Seen([], Counter({(UNKNOWN, 0, 0): 11, (UNKNOWN, 1, 1): 1}))
    for data in (b"".join(parts), b"\xef\xbb\xbf".join([b"", *parts]), b"# a\n".join(parts)):
        path.write_bytes(data)
        assert read(path)[1] == expected
    path.write_bytes(b"".join(parts * 30_000))
    assert sum(read(path)[1].counts.values()) == 12 * 30_000
    path.write_bytes(b"layer,expert\n0,0\n1,1\nlayer,expert\n0,0\n")
    assert read(path)[1].counts == {(UNKNOWN, 0, 0): 2, (UNKNOWN, 1, 1): 1}


@pytest.mark.parametrize(("count", "expected"), [(0, None), (1, None), (2, 14)])
def test_tokens_of_joined_counts_are_known_where_each_says_them(
    count: int, expected: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "counts.csv"
    facts = [b"# tokens=7\n"] * count + [b""] * (2 - count)
    path.write_bytes(b"".join(fact + b"layer,expert,count\n0,0,5\n" for fact in facts))
    assert read(path)[0][0].token_count == expected


def test_joined_counts_without_a_newline_between_are_named(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_bytes(b"layer,expert,count\n0,0,5layer,expert,count\n0,0,6\n")
    with pytest.raises(TraceError, match="line 2: not a count.*'0,0,5layer,expert,count'"):
        read(path)


def test_a_phase_that_is_not_known_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    rows = "".join(f"0,{phase},{step},1,0,{step},\n" for step, phase in enumerate((0, 1, 2, 7)))
    path.write_text("turn,phase,step,layer,slot,expert,\n" + rows)
    assert [one[1] for one in read(path)[1].tokens] == [PREFILL, DECODE, UNKNOWN, UNKNOWN]
    summary = moepack.import_trace([str(path)], tmp_path / "out")
    assert summary.unknown == ("phases",)
    path.write_text("turn,phase,step,layer,slot,expert,\n" + "".join(rows.splitlines(True)[:2]))
    assert moepack.import_trace([str(path)], tmp_path / "other").unknown == ()


# Arrays.


def array_of(tokens: list[TokenExperts], layers: list[int]) -> NDArray[np.int32]:
    found = np.full((len(tokens), len(layers), 8), -1, np.int32)
    for n, token in enumerate(tokens):
        for layer, experts in token.items():
            found[n, layers.index(layer), : len(experts)] = experts
    return found


def renumbered(trace: Trace) -> Trace:
    at = layers_of(trace)
    return [
        [Call(c.phase, [{at.index(n): x for n, x in t.items()} for t in c.tokens]) for c in one]
        for one in trace
    ]


def arrays_of(trace: Trace) -> list[dict[str, NDArray[np.int32]]]:
    """Return what vLLM gives for each request."""
    names = {"prompt_routed_experts": PREFILL, "routed_experts": DECODE}
    layers = layers_of(trace)
    return [
        {
            name: array_of(tokens_of(only([request], phase)), layers)
            for name, phase in names.items()
            if only([request], phase)[0]
        }
        for request in trace
    ]


def phased(trace: Trace, phase: int) -> Trace:
    return [[Call(phase, call.tokens) for call in request] for request in trace]


@FEW
@given(trace=traces(wide=False), packing=st.sampled_from(PACKINGS), has_shape=st.booleans())
def test_arrays_without_names(trace: Trace, packing: str, has_shape: bool, tmp_path: Path) -> None:
    layers = layers_of(trace)
    expected = seen(phased(trace if has_shape else renumbered(trace), UNKNOWN))
    one = array_of(tokens_of(trace), layers)
    several = {f"r{n}": array_of(tokens_of([request]), layers) for n, request in enumerate(trace)}
    path = tmp_path / "trace"
    for data in (npy(one), npy(one.astype(np.int16)), npz(a=one), json.dumps(one.tolist()).encode(),
                 npz(**several)):  # fmt: skip
        path.write_bytes(packed(data, packing))
        with pieces_of(20):
            origins, found, _ = read(path, shape_of(trace) if has_shape else None)
        assert origins[0].unknown == {"phases", *([] if has_shape else ["layers"])}
        assert [row[1:] for row in found.tokens] == [row[1:] for row in expected.tokens]
    assert found == expected


@FEW
@given(trace=traces(wide=False), has_shape=st.booleans())
def test_requests_of_vllm(trace: Trace, has_shape: bool, tmp_path: Path) -> None:
    shape = shape_of(trace) if has_shape else None
    unknown = set() if has_shape else {"layers"}
    path = tmp_path / "trace"
    requests = [{name: a.tolist() for name, a in one.items()} for one in arrays_of(trace)]
    lines = b"".join(json.dumps(request).encode() + b"\n" for request in requests)
    for data in (json.dumps(requests, indent=1).encode(), lines):
        path.write_bytes(data)
        origins, found, _ = read(path, shape)
        assert found == seen(trace if has_shape else renumbered(trace))
        assert [origin.unknown for origin in origins] == [unknown]
    path.write_bytes(npz(**arrays_of(trace)[0]))
    kept = trace if has_shape else renumbered(trace)
    assert read(path, shape)[1] == seen(kept[:1])


def sglang(trace: Trace) -> list[NDArray[np.int32]]:
    layers = list(range(max(layers_of(trace)) + 1))
    return [array_of(call.tokens, layers).swapaxes(0, 1) for call in calls_of(trace)]


@FEW
@given(trace=traces(wide=False))
def test_records_of_sglang(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    records = [{"forward_pass_id": 1, "topk_ids_of_layer": a.tolist()} for a in sglang(trace)]
    whole = np.concatenate(sglang(trace), axis=1)
    expected = [row[1:] for row in seen(phased(trace, UNKNOWN)).tokens]
    for data in (json.dumps({"records": records}).encode(), npz(topk_ids_of_layer=whole)):
        path.write_bytes(data)
        assert [row[1:] for row in read(path)[1].tokens] == expected


def test_sglang_does_not_tell_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    records = [{"topk_ids_of_layer": array.tolist()} for array in sglang(SMALL)]
    path.write_text(json.dumps({"records": records}))
    origins, found, _ = read(path)
    assert origins[0].unknown == {"phases", "requests"}
    assert {row[0] for row in found.tokens} == {0}


@FEW
@given(trace=traces(wide=False))
def test_counts_in_arrays(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    expert_count = max(shape_of(trace).values())
    counts = np.zeros((2, max(layers_of(trace)) + 1, expert_count), np.int32)
    for (_, layer, expert), count in counted(trace).items():
        counts[:, layer, expert] = count // 2, count - count // 2
    path.write_bytes(npz(logical_count=counts))
    origins, found, _ = read(path, shape_of(trace))
    assert found == Seen([], counted(trace))
    assert origins[0].unknown == {"tokens", "phases", "requests"}
    assert origins[0].expert_count == expert_count
    total = counts.sum(axis=0)
    heat = [{"layer": n, "heat": total[n].tolist()} for n in layers_of(trace)]
    token_count = len(seen(trace).tokens)
    path.write_text(json.dumps({"model": "m", "n_decode_tokens": token_count, "layers": heat}))
    origins, found, _ = read(path)
    assert found == Seen([], counted(trace, DECODE))
    assert origins[0].unknown == {"tokens", "requests"}
    assert (origins[0].model, origins[0].token_count) == ("m", token_count)
    assert origins[0].expert_counts == shape_of(trace)


@pytest.mark.parametrize("names", [("topk_ids_of_layer",), ("routed_experts",), ("a", "b")])
def test_counts_beside_tokens_are_left_out(names: tuple[str, ...], tmp_path: Path) -> None:
    """They would count the same selections again."""
    path = tmp_path / "trace"
    counts = np.array([[[1, 1]]])
    arrays: dict[str, NDArray[Any]] = {name: np.array([[[0]], [[1]]]) for name in names}
    documents = [npz(**arrays, logical_count=counts)]
    if names != ("a", "b"):
        record = {name: array.tolist() for name, array in arrays.items()}
        documents.append(json.dumps(record | {"logical_count": counts.tolist()}).encode())
    for data in documents:
        path.write_bytes(data)
        origins, found, warnings = read(path)
        assert not found.counts
        assert sum(len(one[2]) for one in found.tokens) == 2 * len(names)
        assert "tokens" not in origins[0].unknown
        assert warnings == {"arrays that count the selections of the others again": 1}
    path.write_bytes(
        npz(**{name: array[:0] for name, array in arrays.items()}, logical_count=counts)
    )
    assert sum(read(path)[1].counts.values()) == 2


# Recognition.


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"0 1 2\n0 2 3\n", "fits colibri-usage or potatomaxx"),
        (TEXTS["log"].write(SMALL) + TEXTS["moe-flash"].write(SMALL), "expert-log or moe-flash"),
        (b'{"x":1,"token":0,"layer":1,"experts":[2]}\n', "mer or json"),
        (b"hello\nworld\n", "not a trace of a format"),
        (b"1\n2\n", "not a trace of a format"),
        (b"", "empty"),
        (b"\n\n# nothing\n", "not a trace of a format"),
        (b"\x00" * 64, "not a trace of a format"),
    ],
)
def test_what_is_ambiguous_or_unknown_is_refused(data: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for packing in PACKINGS:
        path.write_bytes(packed(data, packing) if data else data)
        with pytest.raises(TraceError, match=problem) as caught:
            read(path)
        assert caught.value.hint is not None
        assert all(name in caught.value.hint for name in ("`format`", *registry.NAMES))


def test_format_overrules_the_content(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"0 1 2\n0 2 3\n")
    assert read(path, form="potatomaxx")[1].tokens == [(0, UNKNOWN, [(1, 2), (2, 3)])]
    counts = Counter({(0, 0, 1): 2, (0, 0, 2): 3})
    assert read(path, form="colibri-usage")[1] == Seen([], counts)
    with pytest.raises(RequestError, match="no such format"):
        read(path, form="csv")


@pytest.mark.parametrize("fault", [False, True])
def test_an_imatrix_may_be_compressed(tmp_path: Path, fault: bool) -> None:
    """As other traces; what is wrong in it is said of the file that was named."""
    data = (FIXTURES / "qwen3moe-imatrix.gguf").read_bytes()
    packed = tmp_path / "imatrix.gz"
    packed.write_bytes(gzip.compress(data[:1000] if fault else data))
    if fault:
        with pytest.raises(TraceError) as caught:
            measure.load(str(packed))
        assert caught.value.path == str(packed)
        return
    plain = measure.load(str(FIXTURES / "qwen3moe-imatrix.gguf"))
    assert measure.load(str(packed)).counts == plain.counts
