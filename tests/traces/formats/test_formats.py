"""Reading every format of traces, selection by selection."""

import os
import random
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moepack
from moepack.common.errors import RequestError, TraceError
from moepack.traces.formats import registry
from tests.support.trace_samples import (
    ALL,
    BINARY,
    DECODE,
    FEW,
    PACKINGS,
    PREFILL,
    SMALL,
    TEXTS,
    UNKNOWN,
    packed,
    pieces_of,
    read,
    refused,
    shape_of,
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
    path = tmp_path / f"trace.gguf{packing}.npz"
    written = sample.write(trace)
    if name in TEXTS and data.draw(st.booleans()):
        written = written.replace(b"\n", b"\r\n")
    if name in TEXTS and data.draw(st.booleans()):
        written = b"\xef\xbb\xbf" + written
    path.write_bytes(packed(written, packing))
    with pieces_of(length):
        origins, content, warnings = read(path, shape)
    assert content == sample.keeps(trace)
    assert [origin.unknown for origin in origins] == [sample.unknown]
    assert not warnings
    if name != "moepack":
        assert (origins[0].format, origins[0].name) == (sample.form, path.name)


@pytest.mark.parametrize("name", ["log", "log without token lines", *BINARY])
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
    assert {sample.form for sample in ALL.values()} == {*registry.NAMES}


# Logs.


def noisy(log: bytes, rng: random.Random) -> bytes:
    others = [
        b"slot print_timing: id  0 | task 0 | eval time = 12 ms / layer 3 expert 4",
        b"layer 3 expert 4 was slow", b"layer 3 experts 4", b"layer", b"",
        b"--- token 3", b"moe: layer 3 expert 4", b"layer 3  expert 4", b"12", b"layer 3 expert",
        b"---", b"x\xff\xfe \xc3\x28", b"x" * 300, b"layer 7 expert -5", b"layer 7 expert x5",
        b"layer 7 expert 1 5", b"layer 7 expert 1x5",
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
    lines = [f"layer {layer} expert {layer}" for layer in range(400)]
    log = "\n".join([*lines[:300], "---token 1", *lines[300:], ""])
    path.write_text(log)
    with pieces_of(100):
        tokens = read(path)[1].tokens
    assert [len(one[2]) for one in tokens] == [300, 100]


# Tables.


def test_rows_of_a_second_router_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    heading = "decode_call,token_in_call,layer,occurrence,experts\n"
    path.write_text(heading + "0,0,1,0,3 4\n0,0,1,1,5\n0,0,2,0,6\n1,0,1,1,7\n")
    _, content, warnings = read(path)
    assert content.tokens == [(0, UNKNOWN, [(1, 3), (1, 4), (2, 6)])]
    assert warnings == {"rows of a layer's second router": 2}


@pytest.mark.parametrize(("count", "expected"), [(0, None), (1, None), (2, 14)])
def test_tokens_of_joined_counts_are_known_where_each_says_them(
    count: int, expected: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "counts.csv"
    facts = [b"# tokens=7\n"] * count + [b""] * (2 - count)
    path.write_bytes(b"".join(fact + b"layer,expert,count\n0,0,5\n" for fact in facts))
    assert read(path)[0][0].token_count == expected


def test_a_phase_that_is_not_known_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    rows = "".join(f"0,{phase},{step},1,0,{step},\n" for step, phase in enumerate((0, 1, 2, 7)))
    path.write_text("turn,phase,step,layer,slot,expert,\n" + rows)
    assert [one[1] for one in read(path)[1].tokens] == [PREFILL, DECODE, UNKNOWN, UNKNOWN]
    summary = moepack.import_trace([str(path)], tmp_path / "out")
    assert summary.unknown == ("phases",)
    path.write_text("turn,phase,step,layer,slot,expert,\n" + "".join(rows.splitlines(True)[:2]))
    assert moepack.import_trace([str(path)], tmp_path / "other").unknown == ()


# Recognition.


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"layer,expert\nlayer 1 expert 2\n", "fits expert-log or counts"),
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
    path.write_bytes(b"0,1,2\nlayer 1 expert 2\n")
    assert read(path, form="expert-log")[1].tokens == [(0, UNKNOWN, [(1, 2)])]
    error = refused(path, form="counts")
    assert error.place == "line 2"
    with pytest.raises(RequestError, match="no such format"):
        read(path, form="csv")
