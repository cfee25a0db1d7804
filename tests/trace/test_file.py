"""Moepack's own trace file, whole, cut or damaged; other binary files that are; and large ones."""

import bz2
import gzip
import json
import lzma
import os
import random
import resource
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from conformance import make_traces
from conformance.make_traces import HEADER, ONE, end_payload, origin_payload, record
from conformance.make_traces import tokens_payload as payload_of
from moepack.errors import MachineError, RequestError, TraceError
from moepack.trace import file
from moepack.trace.compressed import TraceStream
from moepack.trace.file_writer import Writer
from moepack.trace.formats import registry
from moepack.trace.model import MAX_COUNT, Counts, Item, Origin, Phase, Tokens, Unknown
from moepack.trace.validation import Checks
from tests.support import trace_samples as samples
from tests.support.amounts import amounts
from tests.support.hostile_input import MAX_MEMORY, assert_cheap, measured
from tests.support.machine_faults import Room
from tests.support.models import FIXTURES, flip
from tests.support.trace_faults import refused
from tests.support.trace_forms import ALL, BIG, FEW, PACKINGS, SMALL, pieces_of
from tests.support.trace_samples import flat, read

pytestmark = pytest.mark.long

COMPRESSORS = (gzip.compress, zstandard.compress, lzma.compress, bz2.compress)
TRACE = FIXTURES / "qwen3moe-trace.csv"
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


def tokens(*rows: tuple[int, int, list[tuple[int, int]]]) -> Tokens:
    pairs = [pair for row in rows for pair in row[2]]
    return Tokens(
        np.array([row[0] for row in rows], np.int64),
        np.array([row[1] for row in rows], np.uint8),
        np.cumsum([0, *(len(row[2]) for row in rows)]),
        np.array([pair[0] for pair in pairs], np.uint16),
        np.array([pair[1] for pair in pairs], np.uint16),
    )


def counts(phase: int, *rows: tuple[int, int, int]) -> Counts:
    layer, expert = (np.array([row[n] for row in rows], np.uint16) for n in (0, 1))
    return Counts(Phase(phase), layer, expert, np.array([row[2] for row in rows], np.int64))


OTHER = Origin("x", "b")
ITEMS: list[Item] = [
    ORIGIN,
    tokens((0, 1, [(1, 2), (3, 300)]), (0, 2, [(1, 65535)]), (3, 0, [(65535, 0)])),
    counts(1, (1, 1, 5), (3, 257, MAX_COUNT)),
    OTHER,
    tokens((0, 2, [(5, 6)])),
    counts(0, (1, 2, 3)),
]


def write(
    path: Path,
    items: Iterable[Item],
    append: bool = False,
    act: Any = id,
    resume: bool = False,
) -> bytes:
    with Writer(path, append=append, resume=resume) as writer:
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


@FEW
@given(trace=samples.traces(), packing=st.sampled_from(PACKINGS), name=st.sampled_from([*ALL]))
def test_what_is_imported_is_read(trace: Any, packing: str, name: str, tmp_path: Path) -> None:
    sample, path = ALL[name], tmp_path / "trace"
    source = tmp_path / "source"
    source.write_bytes(sample.write(trace))
    found = list(registry.read(str(source), Checks(str(source))))
    written = write(path, found)
    path.write_bytes(samples.packed(written, packing))
    with pieces_of(50):
        origins, again, _ = read(path)
    assert origins == [item for item in found if isinstance(item, Origin)]
    assert again == flat(found)
    assert write(path, found) == written


class Stored(NamedTuple):
    """A record as it stands in a file."""

    offset: int
    kind: int
    head: bytes
    payload: bytes


def records_of(data: bytes) -> list[Stored]:
    """Take a sound file apart, by none of moepack's code."""
    at, records = len(HEADER), []
    while at < len(data):
        kind, stored, length, flags, digest = struct.unpack_from("<IIIIQ", data, at)
        payload = zstandard.decompress(data[at + 24 : at + 24 + stored])
        assert (len(payload), flags) == (length, 0)
        assert digest == xxhash.xxh3_64_intdigest(payload)
        records.append(Stored(at, kind, data[at : at + 24], payload))
        at += 24 + stored
    return records


def test_the_layout_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(samples.own(SMALL))
    assert read(path)[1] == samples.seen(SMALL)
    data = write(path, ITEMS[:2])
    assert data.startswith(HEADER)
    records = records_of(data)
    assert [one.kind for one in records] == [1, 2, 4]
    payloads = [one.payload for one in records]
    assert json.loads(payloads[0]) == {
        **ORIGIN.to_json(),
        "family": "ffn_exps",
        "expert_counts": {"1": 65536, "3": 512, "65535": 1},
        "experts_used": 8,
        "recording": "mine",
    }
    rows = [(0, 1, [(1, 2), (3, 300)]), (0, 2, [(1, 65535)]), (3, 0, [(65535, 0)])]
    assert payloads[1] == payload_of(rows)
    assert payloads[2] == end_payload([one.head for one in records[:2]], 3, 4)


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


def test_a_key_twice_in_an_origin_is_refused(tmp_path: Path) -> None:
    """Which TRACE.md leaves to readers."""
    path = tmp_path / "trace"
    for key in ('"name":"b"', '"other":[{"x":1,"x":1}]'):
        path.write_bytes(make_traces.file(make_traces.raw_origin(make_traces.with_key(key)), ONE))
        assert refused(path).problem == "not JSON: an object has the same key twice"


def test_the_real_trace_becomes_small(tmp_path: Path) -> None:
    found = list(registry.read(str(TRACE), Checks(str(TRACE))))
    data = write(tmp_path / "trace", found)
    assert read(tmp_path / "trace")[1] == flat(found)
    assert len(data) < len(gzip.compress(TRACE.read_bytes())) < 2000


def test_small_pieces_are_gathered_and_large_ones_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moepack.trace.file_writer._RECORD_SELECTIONS", 8)
    path = tmp_path / "trace"
    rng = random.Random(0)
    rows = [
        (n // 9, 2, [(layer, rng.randrange(65536)) for layer in range(rng.choice((1, 3, 99)))])
        for n in range(200)
    ]
    pieces = [tokens(*rows[a:b]) for a, b in pairwise((0, 1, 2, 3, 50, 51, 199, 200))]
    write(path, [OTHER, *pieces])
    assert read(path)[1].tokens == rows


def test_appending_adds_records(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, ITEMS[:3], append=True)
    assert write(path, ITEMS[3:], append=True) == write(tmp_path / "other", ITEMS)
    assert items_of(path) == PLAIN


@pytest.mark.parametrize("data", [b"", b"layer 1 expert 2\n", HEADER[:9], HEADER[:8] + b"\2" * 8])
def test_only_trace_files_are_appended_to(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    with pytest.raises(TraceError):
        Writer(path, append=True)
    assert path.read_bytes() == data


def interrupt(writer: Writer, *done: object) -> None:
    raise KeyboardInterrupt


ACTS = (
    interrupt,
    lambda writer: interrupt(writer, writer.add(ORIGIN)),
)


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_an_exception_leaves_nothing_new(act: Any, append: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with pytest.raises(KeyboardInterrupt):
        write(path, ITEMS, append, act)
    assert os.listdir(tmp_path) == []
    before = write(path, ITEMS)
    with pytest.raises(KeyboardInterrupt):
        write(path, ITEMS, append, act)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace"]


def fill(path: Path, append: bool) -> None:
    numbers = np.random.default_rng(0).permutation(1 << 16).astype(np.uint16)
    layers, experts = np.append(numbers, numbers[::-1]), np.append(numbers[::-1], numbers + 1)
    one = Tokens(np.array([0]), np.array([2], np.uint8), np.array([0, 1 << 17]), layers, experts)
    write(path, [OTHER, one] * 4, append)


def too_full(path: Path) -> None:
    """Write a new file where it has no room, then to the end of one."""
    with pytest.raises(MachineError, match="cannot write"):
        fill(path, False)
    assert os.listdir(path.parent) == []
    before = write(path, ITEMS)
    with pytest.raises(MachineError, match="cannot write"):
        fill(path, True)
    assert path.read_bytes() == before


@contextmanager
def limited(length: int) -> Iterator[None]:
    """Let no file grow beyond a length: it cuts a write short, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with limited(300_000):
        too_full(path)
    fill(path, True)
    assert items_of(path)[: len(PLAIN)] == PLAIN


def test_a_full_disk(tmp_path: Path) -> None:
    with Room() as room:
        too_full(room.mount(tmp_path, "-t", "tmpfs", "-o", "size=400k", "tmpfs") / "trace")


def test_flushing_to_a_full_disk_is_an_error_of_the_machine(tmp_path: Path) -> None:
    with limited(20), pytest.raises(MachineError, match="cannot write"):
        write(tmp_path / "trace", [ORIGIN], act=Writer.keep)


@pytest.mark.parametrize("append", [False, True])
def test_what_was_kept_outlives_an_exception(append: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    before = write(path, ITEMS) if append else b""
    with pytest.raises(KeyboardInterrupt):
        write(path, ITEMS, append, lambda w: interrupt(w, w.keep(), w.add(ORIGIN)))
    expected = tmp_path / "expected"
    if append:
        expected.write_bytes(before)
    assert path.read_bytes() == write(expected, ITEMS, append)
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
    """Nor is what is no trace."""
    partial = tmp_path / "trace.partial"
    partial.write_bytes(data)
    with pytest.raises(RequestError, match="earlier run") as caught:
        Writer(tmp_path / "trace")
    assert "rename it" in str(caught.value.hint)
    assert partial.read_bytes() == data


@pytest.mark.parametrize("length", [0, 16, 30, None])
def test_an_import_that_was_left_is_written_over(length: int | None, tmp_path: Path) -> None:
    path, partial = tmp_path / "trace", tmp_path / "trace.partial"
    whole = write(tmp_path / "other", ITEMS)
    partial.write_bytes((whole + whole[len(HEADER) :])[:length])
    assert write(path, ITEMS) == whole
    assert not partial.exists()


@pytest.mark.parametrize("append", [False, True])
def test_one_writes_at_a_time(append: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    if append:
        write(path, ITEMS)
    with Writer(path, append=append) as writer:
        with pytest.raises(MachineError, match="another process"):
            Writer(path, append=append)
        writer.add(ITEMS[0])


def test_a_cut_tail_is_overwritten_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    whole = write(path, ITEMS)
    path.write_bytes(
        without_end(whole) + record(2, payload_of([(0, 2, [(n, n) for n in range(900)])]))[:-1]
    )
    assert len(write(path, [ORIGIN], append=True)) < len(whole) + 300
    assert items_of(path)[-1] == ORIGIN


def without_end(data: bytes) -> bytes:
    """Cut the end off a file."""
    return data[: records_of(data)[-1].offset]


@pytest.mark.parametrize("step", amounts(3, 1))
def test_a_file_that_is_cut_anywhere(tmp_path: Path, step: int) -> None:
    """It is an error, and a prefix of its records; what is appended then is read."""
    path = tmp_path / "trace"
    whole = write(path, ITEMS)
    more = [plain(ORIGIN), plain(ITEMS[1])]
    borders: set[int] = set()
    for length in range(len(HEADER), len(whole), step):
        path.write_bytes(whole[:length])
        checks = Checks(str(path), lenient=True)
        found = items_of(path, checks)
        assert found == PLAIN[: len(found)]
        assert checks.warnings == {file.CUT: 1}
        error = refused(path)
        assert error.problem == "the file has no end: it was cut, or is still being written"
        borders.add(int(str(error.place).removeprefix("byte ")))
        with Writer(path, append=True) as writer:
            assert writer.was_cut
            assert [plain(item) for item in writer.held_items()] == found
            for item in (ORIGIN, ITEMS[1]):
                writer.add(item)
        assert path.read_bytes().startswith(whole[: max(borders)])
        assert items_of(path) == found + more
    assert len(borders) == len(ITEMS) + 1
    for length in range(len(HEADER)):
        path.write_bytes(whole[:length])
        refused(path, lenient=True, form="moepack")


def look(writer: Writer, found: list[Any]) -> None:
    """Note what a writer found in its file, and be interrupted."""
    found += [plain(item) for item in writer.held_items()]
    raise KeyboardInterrupt


def test_going_on_drops_the_last_request_of_a_file_without_end(tmp_path: Path) -> None:
    """It may be cut between two of its records."""
    path, partial = tmp_path / "trace", tmp_path / "trace.partial"
    first, again = tokens((0, 1, [(1, 2)])), tokens((1, 1, [(1, 3)]), (1, 2, [(1, 4)]))
    with Writer(path) as writer:
        for item in (ORIGIN, first, again):
            writer.add(item)
            writer.keep()
    whole = path.read_bytes()
    path.rename(partial)
    for data, count in ((whole, 3), (without_end(whole), 2), (whole[:16], 0)):
        partial.write_bytes(data)
        found: list[Any] = []
        with pytest.raises(KeyboardInterrupt):
            write(path, [], resume=True, act=lambda writer, found=found: look(writer, found))
        assert found == [plain(item) for item in (ORIGIN, first, again)[:count]]
        assert partial.read_bytes() == data, "nothing was written, so nothing is changed"
        with Writer(path, resume=True) as writer:
            for item in (ORIGIN, first, again)[count:]:
                writer.add(item)
                writer.keep()
        assert path.read_bytes() == whole
        path.unlink()


def test_going_on_drops_no_request_of_the_origin_before(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    items: list[Item] = [ORIGIN, tokens((0, 1, [(1, 2)])), OTHER]
    path.write_bytes(without_end(write(path, items)))
    with Writer(path, resume=True) as writer:
        assert [plain(item) for item in writer.held_items()] == [plain(item) for item in items]


def test_a_compressed_file_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    data = gzip.compress(write(path, ITEMS))
    path.write_bytes(data)
    with pytest.raises(TraceError, match="it is compressed"):
        Writer(path, append=True)
    assert path.read_bytes() == data


def flipped(path: Path, data: bytes, masks: Iterable[int], places: Iterable[int]) -> None:
    path.write_bytes(data)
    expected = items_of(path)
    for place in places:
        for mask in masks:
            path.write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
            try:
                found = items_of(path)
            except TraceError:
                continue
            assert found == expected, f"byte {place} ^ {mask:#x}"


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    data = write(tmp_path / "trace", ITEMS)
    flipped(tmp_path / "trace", data, (0x01, 0x80, 0xFF), range(len(data)))


def test_a_length_that_swallows_the_next_record_is_noticed(tmp_path: Path) -> None:
    one, two = (make_traces.tokens((0, 2, [(n, n)])) for n in (1, 2))
    data = make_traces.file(make_traces.origin(), one, two)
    flipped(tmp_path / "trace", data, range(1, 256), [records_of(data)[1].offset + 4])


def test_appending_to_a_damaged_file_cuts_nothing_off(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    before = write(path, ITEMS)
    flip(path, len(HEADER) + 7)
    with pytest.raises(TraceError):
        write(path, ITEMS[:1], append=True)
    assert len(path.read_bytes()) == len(before)


def test_counts_too_many_for_a_record_are_cut_and_zeros_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    many = np.zeros(6_000_000, np.uint16)
    numbers = many.astype(np.int64) + 1
    numbers[::3] = 0
    write(path, [OTHER, Counts(Phase.DECODE, many, many, numbers)])
    assert sum(len(one[2]) for one in items_of(path)[1:]) == 4_000_000


@pytest.mark.parametrize("name", ["log", "mblt", "moepack"])
def test_compression_that_is_cut_or_damaged(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    data = ALL[name].write(SMALL * 20)
    for whole in (compress(data) for compress in COMPRESSORS):
        for cut in (5, 20, len(whole) // 2, len(whole) - 9, len(whole) - 1):
            path.write_bytes(whole[:cut])
            assert "cut short" in str(refused(path).hint)
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes(99) + whole[middle + 99 :])
        refused(path)


def test_streams_of_mbolt_with_bad_records(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for rest in (
        [2, 0, 1, 5], [2, 1, 0, 5], [2, -1, 1, 5], [2, 5000, 1, 5], [2, 1, 1 << 21, 5],
        [-2, 1, 1, 5], [2, 1, 1, 1 << 17], [2, 1, 1], [2, 1], [2, 2, 1, 5],
    ):  # fmt: skip
        path.write_bytes(struct.pack(f"<{7 + len(rest)}i", 0x544C424D, 1, 8, 1, 1, 1, 5, *rest))
        for length in (3, 16, 1 << 20):
            with pieces_of(length):
                assert refused(path).place == "byte 28"
    _, found, warnings = read(path, lenient=True)
    assert found.tokens == [(0, 2, [(1, 5)])]
    assert warnings == {"the last record is cut short": 1}
    path.write_bytes(struct.pack("<3i", 0x544C424D, 2, 8))
    assert "another version" in refused(path).problem
    path.write_bytes(b"MBLT\1\0\0\0")
    assert refused(path).problem == "not an MBLT stream"


READ = (
    "from moepack.trace import model, validation; from moepack.trace.formats import registry",
    "n = 0\nfor item in registry.read(path, validation.Checks(path)):\n"
    "    n += len(item.layer) if isinstance(item, model.Tokens) else 0\nassert n == {}",
)


@pytest.mark.long
@pytest.mark.parametrize("name", ["log", "log without token lines"])
def test_a_large_log_is_read_in_little_memory(name: str, tmp_path: Path) -> None:
    part = ALL[name].write([[call for call in samples.calls_of(BIG) if call.phase == Phase.DECODE]])
    times = 30_000_000 // len(part) + 1
    (tmp_path / "server.log").write_bytes(part * times)
    count = times * part.count(b"\nlayer")
    found = measured((READ[0], READ[1].format(count)), tmp_path / "server.log")
    assert found.text == ""
    assert found.memory < MAX_MEMORY


def test_a_record_of_mbolt_that_says_it_is_huge_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(struct.pack("<6i", 0x544C424D, 1, 8, 1, 4096, 1 << 20))
    os.truncate(path, 40 << 20)
    assert_cheap(READ, path)
