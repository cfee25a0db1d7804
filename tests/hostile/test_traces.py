"""Hostile traces and hotness files: each rule broken alone, giants, damage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from conformance import make_traces
from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey
from moepack.traces.hotness import file
from moepack.traces.hotness.model import Hotness
from moepack.traces.model import MAX_COUNT
from tests.support.hostile_input import (
    MAX_SECONDS,
    QUICK,
    assert_cheap,
    assert_clear,
    filled,
    measured,
    mutants,
)

LINE = b"0,0,5\n"
BAD_HOTNESS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no counts"),
    "comments alone": (b"# tokens=5\n# more\n", "no counts"),
    "the heading alone": (b"layer,expert,count\n", "no counts"),
    "not UTF-8": (LINE + b"\xff\n", "line 2: not a count"),
    "a fact that is not UTF-8": (b"# origin=\xff\n" + LINE, "line 1: not UTF-8"),
    "UTF-16": ("0,0,5\n".encode("utf-16"), "UTF-16"),
    "a GGUF": (b"GGUF\3\0\0\0" + bytes(90), "zero bytes"),
    "two fields": (LINE + b"0,1\n", "line 2: not as many columns as before"),
    "more fields than before": (LINE + b"0,1,3,2\n", "line 2: not as many columns as before"),
    "five fields": (LINE + b"0,1,2,3,4\n", "line 2: not a count"),
    "more held out than counted": (b"0,1,2,3\n", "line 1: more held out than counted"),
    "an origin that is no JSON": (b"# origin={1}\n" + LINE, "line 1: not an origin"),
    "an origin that is no object": (b"# origin=7\n" + LINE, "line 1: not an origin"),
    "a negative count": (LINE + b"0,1,-1\n", "line 2: not a count"),
    "other digits": ("0,0,\u0665\n".encode(), "line 1: not a count"),
    "a count of 2^63": (b"0,0,9223372036854775808\n", "line 1: a number out of bounds"),
    "counts that add up to 2^63": (b"0,0,9223372036854775807\n0,0,1\n", "add up to too many"),
    "counts of all that add up to 2^63": (
        b"0,0,9223372036854775807\n7,3,1\n",
        "add up to too many, expected <= 9,223,372,036,854,775,807 in all, found",
    ),
    "a count of 5000 digits": (b"0,0," + b"9" * 5000 + b"\n", "line 1: a number out of bounds"),
    "a layer of six digits": (b"100000,0,5\n", "line 1: out of bounds"),
    "an expert of six digits": (b"0,100000,5\n", "line 1: out of bounds"),
    "an endless line": (b"1" * (1 << 20) + b"\n", "line 1: not a count"),
    "a line without end": (b"1" * (18 << 20), "line too long"),
    "NUL": (LINE + b"\0\n", "zero bytes"),
    "a token count of words": (b"# tokens=many\n" + LINE, "line 1: not a token count"),
    "a token count of 2^63": (b"# tokens=9223372036854775808\n" + LINE, "line 1: not a token"),
    "token counts that add up to 2^63": (
        b"# tokens=9223372036854775807\nlayer,expert,count\n# tokens=1\n" + LINE,
        "line 3: not a token count",
    ),
    "a last line that is cut": (LINE + b"0,1", "line 2: the last line is cut short"),
}


@pytest.mark.parametrize("name", BAD_HOTNESS)
def test_each_rule_of_a_hotness_file_has_an_error(name: str, tmp_path: Path) -> None:
    data, words = BAD_HOTNESS[name]
    path = tmp_path / "hot.csv"
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        file.decode(path.read_bytes(), str(path))
    assert_clear(caught.value, path)
    assert words in str(caught.value)


def loaded(folder: Path, data: bytes) -> Hotness:
    path = folder / "hot.csv"
    path.write_bytes(data)
    return file.decode(path.read_bytes(), str(path))


def test_what_hotness_files_may_look_like(tmp_path: Path) -> None:
    for data in (
        b"0,0,5",
        b"\xef\xbb\xbf0,0,5\r\n",
        b"# x\nlayer,expert,count\n 0,\t0, 5 \n\n",
        b"# a, b\n0,0,5",
    ):
        assert loaded(tmp_path, data).counts == {(0, 0): 5}
    assert loaded(tmp_path, b"#tokens = 7\n0,0,5").token_count == 7
    large = loaded(tmp_path, b"# tokens=%d\n0,0,%d" % (MAX_COUNT, MAX_COUNT))
    assert large.token_count == large.counts[ExpertKey(0, 0)] == (1 << 63) - 1
    origin = b'# origin={"name": "a, b ,c"}\n'
    assert loaded(tmp_path, origin + LINE).origins == ({"name": "a, b ,c"},)


def test_files_that_were_joined_add_up(tmp_path: Path) -> None:
    """That is how people put them together."""
    part = b"# tokens=10\n# requests=2\n# held_out=requests\n# held_out_tokens=4\n"
    part += b'# origin={"name": "a"}\nlayer,expert,count,held_out\n0,0,5,2\n1,3,7,0\n'
    hotness = loaded(tmp_path, part + part)
    assert hotness.origins == ({"name": "a"},) * 2
    assert hotness.counts == {(0, 0): 10, (1, 3): 14}
    assert (hotness.token_count, hotness.request_count) == (20, 4)
    assert hotness.held_out is not None
    assert (hotness.held_out.token_count, hotness.held_out.counts) == (8, {(0, 0): 4})


HOT = b"# tokens=12\nlayer,expert,count\n0,0,5\n0,1,7\n12,345,9007199254740991\n"


@QUICK
@given(
    mutants(HOT)
    | st.binary(max_size=100)
    | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_any_hotness_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(data)
    try:
        hotness = file.decode(path.read_bytes(), str(path))
    except TraceError as error:
        assert_clear(error, path)
        return
    assert hotness.counts
    assert all(0 < count <= MAX_COUNT for count in hotness.counts.values())
    json.dumps(hotness.to_json())


# Giants: seconds and 100 MB, in a process of its own.

LOAD = ("from moepack.traces.hotness import file", "file.decode(open(path, 'rb').read(), path)")
LENGTH = 4 << 20


BIG_HOTNESS: dict[str, Callable[[], bytes]] = {
    "short lines": lambda: LINE + filled(b"aa\n", LENGTH),
    "comments": lambda: filled(b"#a\n", LENGTH),
    "an endless line": lambda: filled(b"1", LENGTH),
    "an endless comment": lambda: filled(b"#", LENGTH),
    "wide letters": lambda: filled("\U0001f4a9".encode(), LENGTH),
}


@pytest.mark.parametrize("name", BIG_HOTNESS)
def test_a_big_hotness_file_is_refused_within_a_second_and_100_mb(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "hot.csv"
    path.write_bytes(BIG_HOTNESS[name]())
    assert_cheap(LOAD, path)


# Tables that grow with what was seen, not with the highest number.

MEASURES = {
    "import": ("import moepack", "moepack.import_trace([path], path + '.moetrace')"),
    "hotness": ("import moepack", "moepack.measure_hotness([path])"),
    "statistics": ("import moepack", "moepack.trace_statistics([path])"),
    "concentration": ("import moepack", "moepack.concentration([path])"),
    "picture": (
        "from moepack.traces.analysis.concentration import read_sample",
        "sample = read_sample([path]); sample.heat_table(); sample.curves()",
    ),
}
HIGHEST = [(0, 65535), (65535, 65535), (65535, 0)]


def few_tokens(path: Path) -> None:
    """Write a trace file of a few hundred bytes with the highest layers and experts."""
    rows = [(0, 2, HIGHEST), (0, 2, HIGHEST), (1, 2, HIGHEST)]
    path.write_bytes(make_traces.file(make_traces.origin(), make_traces.tokens(*rows)))


def few_counts(path: Path) -> None:
    path.write_bytes(b"0,0,1\n65535,65535,9\n")


def few_lines(path: Path) -> None:
    path.write_bytes(b"".join(b"layer %d expert %d\n" % pair for pair in HIGHEST))


@pytest.mark.parametrize(
    ("name", "write"),
    [*((name, few_tokens) for name in MEASURES), ("hotness", few_counts), ("import", few_lines)],
)
def test_high_numbers_cost_nothing(
    name: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    write(path)
    outcome = measured(MEASURES[name], path)
    assert outcome.text == ""
    assert outcome.seconds < MAX_SECONDS
    assert outcome.memory < 150 << 20


READ = (
    "from moepack.traces.formats import registry; from moepack.traces.validation import Checks",
    "for _ in registry.read(path, Checks(path)): pass",
)


def test_much_packed_text_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    text = (b"layer 1 expert 2\n---token\n" + b"." * 4000 + b"\n") * 15_000
    path.write_bytes(zstandard.compress(text))
    outcome = measured(READ, path)
    assert outcome.text == ""
    assert outcome.memory < len(text)


def test_the_heading_of_a_route_is_read_in_time(tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    heading = b"# model=" + b"n_layer=1xn_expert" * 3500 + b"\n"
    path.write_bytes(heading + b"turn,phase,step,layer,slot,expert,\n0,1,0,0,0,1,\n")
    outcome = measured(READ, path)
    assert outcome.text == ""
    assert outcome.seconds < MAX_SECONDS
