"""Moepack's own trace file, whole, cut or damaged; other binary files that are; and large ones."""

import contextlib
import gzip
import json
import os
import random
import resource
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from conformance import make_traces
from conformance.make_traces import HEADER, ONE, end_payload, origin_payload, record
from conformance.make_traces import tokens_payload as payload_of
from moepack.common.errors import MachineError, RequestError, TraceError
from moepack.traces import file
from moepack.traces.compressed import TraceStream
from moepack.traces.file_records import Kind
from moepack.traces.file_writer import Writer
from moepack.traces.model import MAX_COUNT, Counts, Item, Origin, Phase, Tokens, Unknown
from moepack.traces.validation import Checks
from tests.support import trace_samples as samples
from tests.support.amounts import amounts
from tests.support.trace_samples import SMALL, read, refused

pytestmark = pytest.mark.long

ORIGIN = Origin(
    "anemll",
    "a.jsonl",
    frozenset({Unknown.REQUESTS}),
    "tiny",
    7,
    expert_counts={1: 65536, 3: 512, 65535: 1},
    experts_used=8,
    recording="mine",
)


def counts(phase: int, *rows: tuple[int, int, int]) -> Counts:
    layer, expert = (np.array([row[n] for row in rows], np.uint16) for n in (0, 1))
    return Counts(Phase(phase), layer, expert, np.array([row[2] for row in rows], np.int64))


OTHER = Origin("x", "b")
ITEMS: list[Item] = [
    ORIGIN,
    samples.tokens_from([(0, 1, [(1, 2), (3, 300)]), (0, 2, [(1, 65535)]), (3, 0, [(65535, 0)])]),
    counts(1, (1, 1, 5), (3, 257, MAX_COUNT)),
    OTHER,
    samples.tokens_from([(0, 2, [(5, 6)])]),
    counts(0, (1, 2, 3)),
]


def write(path: Path, items: Iterable[Item], resume: bool = False, act: Any = id) -> bytes:
    with Writer(path, resume=resume) as writer:
        for item in items:
            writer.add(item)
        act(writer)
    return path.read_bytes()


def items_of(path: Path, checks: Checks | None = None) -> list[Any]:
    """Read a file of moepack as plain values."""
    with TraceStream(str(path)) as stream:
        return [plain(item) for item in file.read(stream, checks or Checks(str(path)))]


def plain(item: Item) -> Any:
    if isinstance(item, Origin):
        return item
    return [type(item).__name__, *(np.asarray(column).tolist() for column in item)]


PLAIN = [plain(item) for item in ITEMS]


def test_the_layout_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(samples.own(SMALL))
    assert read(path)[1] == samples.seen(SMALL)
    at, heads, payloads = len(HEADER), [], []
    data = write(path, ITEMS[:2])
    assert data.startswith(HEADER)
    for expected in (1, 2, 4):
        kind, stored, length, flags, digest = struct.unpack_from("<IIIIQ", data, at)
        heads.append(data[at : at + 24])
        payloads.append(zstandard.decompress(data[at + 24 : at + 24 + stored]))
        at += 24 + stored
        assert (kind, len(payloads[-1]), flags) == (expected, length, 0)
        assert digest == xxhash.xxh3_64_intdigest(payloads[-1])
    assert at == len(data)
    assert json.loads(payloads[0]) == {
        **ORIGIN.to_json(),
        "family": "ffn_exps",
        "expert_counts": {"1": 65536, "3": 512, "65535": 1},
        "experts_used": 8,
        "recording": "mine",
    }
    rows = [(0, 1, [(1, 2), (3, 300)]), (0, 2, [(1, 65535)]), (3, 0, [(65535, 0)])]
    assert payloads[1] == payload_of(rows)
    assert payloads[2] == end_payload(heads[:2], 3, 4)


def test_all_that_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    first = write(path, ITEMS)
    assert items_of(path) == PLAIN
    assert write(path, ITEMS) == first
    assert os.listdir(tmp_path) == ["trace"]
    with pytest.raises(MachineError, match="cannot write"):
        write(tmp_path / "none" / "trace", ITEMS)


def test_an_origin_that_is_written_is_in_bounds_whatever_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    name = "\U0001f600" * 100_000
    origin = Origin(
        "counts", name, model=name, expert_counts=dict.fromkeys(range(1 << 16), 1 << 16)
    )
    write(path, [origin, ITEMS[1]])
    written, _ = items_of(path)
    assert written.expert_counts == origin.expert_counts
    assert name.startswith(written.model)
    write(path, [Origin("counts", "a\udcff")])
    assert items_of(path) == [Origin("counts", "a?")]


def test_small_pieces_are_gathered_and_large_ones_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moepack.traces.file_writer._RECORD_SELECTIONS", 8)
    path = tmp_path / "trace"
    rng = random.Random(0)
    rows = [
        (n // 9, 2, [(layer, rng.randrange(65536)) for layer in range(rng.choice((1, 3, 99)))])
        for n in range(200)
    ]
    pieces = [samples.tokens_from(rows[a:b]) for a, b in pairwise((0, 1, 2, 3, 50, 51, 199, 200))]
    write(path, [OTHER, *pieces])
    assert read(path)[1].tokens == rows


def test_resuming_adds_records(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, ITEMS[:3], resume=True)
    assert write(path, ITEMS[3:], resume=True) == write(tmp_path / "other", ITEMS)
    assert items_of(path) == PLAIN


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"layer 1 expert 2\n", "not a trace file"),
        (HEADER[:9], "not a trace file"),
        (HEADER[:8] + b"\2" * 8, "another version"),
        (gzip.compress(make_traces.file(make_traces.origin())), "it is compressed"),
        (make_traces.file(make_traces.origin(), ONE)[:-40] + b"\xff" * 40, "damaged"),
    ],
)
def test_only_sound_trace_files_are_continued(data: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=problem):
        Writer(path, resume=True)
    assert path.read_bytes() == data


def interrupt(writer: Writer, *done: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("resume", [False, True])
def test_an_exception_leaves_nothing_new(resume: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with pytest.raises(KeyboardInterrupt):
        write(path, ITEMS, resume, interrupt)
    assert os.listdir(tmp_path) == []
    before = write(path, ITEMS)
    with pytest.raises(KeyboardInterrupt):
        write(path, ITEMS, resume, interrupt)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace"]


@pytest.mark.parametrize(("length", "resume"), [(20, False), (300_000, False), (300_000, True)])
def test_a_disk_without_space_leaves_what_was_there(
    length: int, resume: bool, tmp_path: Path
) -> None:
    """The bound of a file's length cuts a write short, as a full disk does."""
    path = tmp_path / "trace"
    before = write(path, ITEMS) if resume else None
    numbers = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)
    layers, experts = np.append(numbers, numbers[::-1]), np.append(numbers[::-1], numbers + 1)
    one = Tokens(np.array([0]), np.array([2], np.uint8), np.array([0, 1 << 17]), layers, experts)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        with pytest.raises(MachineError, match="cannot write"):
            write(path, [OTHER, one] * 4, resume)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (path.read_bytes() if path.exists() else None) == before
    assert os.listdir(tmp_path) == ["trace"] * resume


@pytest.mark.parametrize("resume", [False, True])
def test_what_was_kept_outlives_an_exception(resume: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    before = write(path, ITEMS) if resume else b""
    with pytest.raises(KeyboardInterrupt):
        write(path, ITEMS, resume, lambda w: interrupt(w, w.keep(), w.add(ORIGIN)))
    expected = tmp_path / "expected"
    if resume:
        expected.write_bytes(before)
    assert path.read_bytes() == write(expected, ITEMS, resume)
    assert sorted(os.listdir(tmp_path)) == ["expected", "trace"]


def test_what_is_kept_has_an_end_at_once(tmp_path: Path) -> None:
    """So a recording that is killed while its model runs leaves a whole file."""
    partial = tmp_path / "trace.partial"
    with Writer(tmp_path / "trace") as writer:
        for count, item in enumerate(ITEMS, start=1):
            writer.add(item)
            writer.keep()
            assert items_of(partial) == PLAIN[:count]
    assert items_of(tmp_path / "trace") == PLAIN


@pytest.mark.parametrize(
    "data",
    [
        b"whole prompts",
        HEADER[:9],
        HEADER + record(1, origin_payload(format="recorded")),
        HEADER + record(1, origin_payload(format="recorded")) + record(1, origin_payload()),
        HEADER + record(2, payload_of([(0, 2, [(1, 2)])])),
    ],
)
def test_a_recording_that_was_left_is_never_overwritten(data: bytes, tmp_path: Path) -> None:
    """Nor is any other file."""
    partial = tmp_path / "trace.partial"
    partial.write_bytes(data)
    with pytest.raises(RequestError, match="earlier run") as caught:
        Writer(tmp_path / "trace")
    assert "rename or delete it" in str(caught.value.hint)
    assert partial.read_bytes() == data


@pytest.mark.parametrize("length", [0, 16, 30, None])
def test_an_import_that_was_left_is_written_over(length: int | None, tmp_path: Path) -> None:
    path, partial = tmp_path / "trace", tmp_path / "trace.partial"
    whole = write(tmp_path / "other", ITEMS)
    partial.write_bytes((whole + whole[len(HEADER) :])[:length])
    assert write(path, ITEMS) == whole
    assert not partial.exists()


@pytest.mark.parametrize("resume", [False, True])
def test_one_writes_at_a_time(resume: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    if resume:
        write(path, ITEMS)
    with Writer(path, resume=resume) as writer:
        with pytest.raises(MachineError, match="another process"):
            Writer(path, resume=resume)
        writer.add(ITEMS[0])


def test_a_cut_tail_is_overwritten_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    whole = write(path, ITEMS)
    path.write_bytes(
        without_end(whole) + record(2, payload_of([(0, 2, [(n, n) for n in range(900)])]))[:-1]
    )
    assert len(write(path, [ORIGIN], resume=True)) < len(whole) + 300
    assert items_of(path)[-1] == ORIGIN


def without_end(data: bytes) -> bytes:
    """Cut the end off a file."""
    return data[: data.rindex(struct.pack("<I", Kind.END))]


@pytest.mark.parametrize("step", amounts(7, 1))
def test_a_file_that_is_cut_anywhere(tmp_path: Path, step: int) -> None:
    """It is an error, and a prefix of its records."""
    path = tmp_path / "trace"
    whole = write(path, ITEMS)
    borders: set[int] = set()
    for length in range(len(HEADER), len(whole), step):
        path.write_bytes(whole[:length])
        checks = Checks(str(path), lenient=True)
        items = items_of(path, checks)
        assert items == PLAIN[: len(items)]
        assert checks.warnings == {file.CUT: 1}
        error = refused(path)
        assert error.problem == "the file has no end: it was cut, or is still being written"
        borders.add(int(str(error.place).removeprefix("byte ")))
    assert len(borders) == len(ITEMS) + 1
    for length in range(len(HEADER)):
        path.write_bytes(whole[:length])
        refused(path, lenient=True, form="moepack")


def test_going_on_drops_the_last_request_of_a_file_without_end(tmp_path: Path) -> None:
    """It may be cut between two of its records."""
    path, partial = tmp_path / "trace", tmp_path / "trace.partial"
    first, again = (
        samples.tokens_from([(0, 1, [(1, 2)])]),
        samples.tokens_from([(1, 1, [(1, 3)]), (1, 2, [(1, 4)])]),
    )
    with Writer(path) as writer:
        for item in (ORIGIN, first, again):
            writer.add(item)
            writer.keep()
    whole = path.read_bytes()
    path.rename(partial)
    for data, count in ((whole, 3), (without_end(whole), 2), (whole[:16], 0)):
        partial.write_bytes(data)
        with contextlib.suppress(KeyboardInterrupt), Writer(path, resume=True) as writer:
            items = [plain(item) for item in writer.held_items()]
            interrupt(writer)
        assert items == [plain(item) for item in (ORIGIN, first, again)[:count]]
        assert partial.read_bytes() == data, "nothing was written, so nothing is changed"
        with Writer(path, resume=True) as writer:
            for item in (ORIGIN, first, again)[count:]:
                writer.add(item)
                writer.keep()
        assert path.read_bytes() == whole
        path.unlink()


def test_going_on_drops_no_request_of_the_origin_before(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    items: list[Item] = [ORIGIN, samples.tokens_from([(0, 1, [(1, 2)])]), OTHER]
    path.write_bytes(without_end(write(path, items)))
    with Writer(path, resume=True) as writer:
        assert [plain(item) for item in writer.held_items()] == [plain(item) for item in items]


@pytest.mark.parametrize("step", amounts(7, 1))
def test_every_flipped_byte_is_noticed(tmp_path: Path, step: int) -> None:
    path = tmp_path / "trace"
    data = write(path, ITEMS)
    for mask, first in ((0x01, 0), (0x80, 1), (0xFF, 2)):
        for place in range(first % step, len(data), step):
            byte = data[place]
            path.write_bytes(data[:place] + bytes([byte ^ mask]) + data[place + 1 :])
            with contextlib.suppress(TraceError):
                assert items_of(path) == PLAIN, f"byte {place} ^ {mask:#x}"


def test_counts_too_many_for_a_record_are_cut_and_zeros_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moepack.traces.file_writer._RECORD_SELECTIONS", 8)
    many = np.zeros(60, np.uint16)
    numbers = many.astype(np.int64) + 1
    numbers[::3] = 0
    write(tmp_path / "trace", [OTHER, Counts(Phase.DECODE, many, many, numbers)])
    assert [len(one[2]) for one in items_of(tmp_path / "trace")[1:]] == [8] * 5
