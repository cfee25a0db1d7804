"""`moepack bench`: the same experts on both sides, honest verdicts, what a person gets to see."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.bench import drive, layouts, run, workload
from moepack.bench.comparison import Schedule
from moepack.bench.layouts import Groups
from moepack.bench.timed_reads import Scratch, in_flight, through_maps, through_queue
from moepack.bench.workload import RoutedLayer
from moepack.common import extras
from moepack.common.errors import MachineError, RequestError, TraceError
from moepack.common.keys import ExpertKey
from moepack.pack.reading.expert_read import PAGE, FileRead
from moepack.report import bench_text, chart
from moepack.source.shards import open_source
from moepack.storage.threaded import ThreadedBackend
from tests.support.models import FIXTURES, REAL_MODELS, first_shard, on_disk, pack_model
from tests.support.needs import require_disk
from tests.support.shapes import shape_of_counts
from tests.support.warm_command import Run

TRACE = FIXTURES / "qwen3moe-trace.csv"
BIG_MOE = """# route_trace v1
# model=m arch=qwen3moe n_layer=2 n_expert=16 n_expert_used=2
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,1,0,0,0,5,0.5,0,100
0,1,0,0,1,3,0.5,0,100
0,1,0,1,0,15,0.5,0,100
0,1,1,0,0,5,0.5,0,100
"""


def contents(groups: Groups) -> list[list[bytes]]:
    """Read the ranges of each expert plainly."""
    return [[on_disk(read) for read in expert.file_reads] for group in groups for expert in group]


@pytest.mark.parametrize("model", REAL_MODELS)
def test_slices_and_parts_are_the_same_bytes_of_the_same_experts(
    model: str, packs: dict[str, Path]
) -> None:
    source = open_source([first_shard(model)])
    with moepack.open(packs[model]) as pack:
        layers = [RoutedLayer(layer, (3, 0, 1)) for layer in pack.layers]
        slices = layouts.slices(source, pack, layers)
        parts = layouts.parts(pack, layers)
        blobs = layouts.blobs(pack, layers)
    assert list(map(sorted, contents(slices))) == list(map(sorted, contents(parts)))
    for (blob,), expert in zip(contents(blobs), contents(parts), strict=True):
        assert len(expert) > 1
        assert len(blob) >= sum(map(len, expert))
        assert blob.replace(b"\0", b"") == b"".join(expert).replace(b"\0", b"")


def test_the_source_of_another_pack_is_refused(pack: moepack.Pack) -> None:
    other = open_source([first_shard("mixtral")])
    with pytest.raises(RequestError) as refused:
        layouts.slices(other, pack, [RoutedLayer(0, (1,))])
    assert re.search("layer 0.*expected ffn_.*_exps.weight of [^[]*, found", str(refused.value))


@pytest.mark.parametrize("model", ["qwen3moe", "gpt-oss"])
def test_raw_reads_are_rounded_to_pages_each_in_its_own_and_not_past_the_end(
    model: str, packs: dict[str, Path]
) -> None:
    source = open_source([first_shard(model)])
    with moepack.open(packs[model]) as pack:
        last = max(pack.layers)
        layers = [RoutedLayer(last, tuple(range(pack.expert_count(last))))]
        groups = layouts.slices(source, pack, layers)
    (portion,) = layouts.portions(groups, [1])
    assert portion.useful_length == sum(part.length for part in groups[0][0].parts) * len(groups[0])
    for expert, rounded in zip(groups[0], portion.rounded[0], strict=True):
        end = 0
        for exact, whole in zip(expert.file_reads, rounded, strict=True):
            length = exact.path.stat().st_size
            assert whole.offset == exact.offset // PAGE * PAGE
            assert whole.offset + whole.length == min(
                -(-(exact.offset + exact.length) // PAGE) * PAGE, length
            )
            assert whole.start % PAGE == 0
            assert whole.start >= end
            end = whole.start + whole.length
        assert end <= portion.longest


def test_portions_are_whole_layers_and_leave_nothing_over(pack: moepack.Pack) -> None:
    groups = layouts.blobs(pack, [RoutedLayer(0, (0,))] * 7)
    assert [len(one.groups) for one in layouts.portions(groups, [2, 2, 3])] == [2, 2, 3]


def test_a_trace_with_several_experts_a_line_is_read_token_by_token() -> None:
    reads = workload.from_trace(str(TRACE), shape_of_counts({0: 16, 1: 16}), 3)
    lines = [line.split(",") for line in TRACE.read_text().splitlines()[1:]]
    tokens = list(dict.fromkeys((line[0], line[1]) for line in lines))[:3]
    expected = [
        RoutedLayer(int(line[2]), tuple(map(int, line[4].split())))
        for token in tokens
        for line in sorted(lines, key=lambda line: int(line[2]))
        if (line[0], line[1]) == token
    ]
    assert reads.layers == expected
    assert reads.token_count == 3


def test_a_trace_with_one_expert_a_line_is_read_token_by_token(tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    path.write_text(BIG_MOE)
    reads = workload.from_trace(str(path), shape_of_counts({0: 16, 1: 16}), 10)
    assert reads.layers == [(0, (5, 3)), (1, (15,)), (0, (5,))]
    assert reads.token_count == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BIG_MOE.replace("0,1,0,1,0,15", "0,1,0,1,0,16"), "line 6.*not of the model.*expert 16"),
        (BIG_MOE.replace("0,1,0,1,0,15", "0,1,0,2,0,15"), "line 6.*not of the model.*layer 2"),
        ("layer,expert,count\n0,1,5\n", "no tokens"),
        (BIG_MOE[: BIG_MOE.index("0,1,0,0,0")], "no selections"),
    ],
)
def test_a_trace_that_is_none_or_of_another_model_is_refused(
    text: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=problem):
        workload.from_trace(str(path), shape_of_counts({0: 16, 1: 16}), 10)


def test_drawn_experts_follow_the_counts_and_are_different() -> None:
    counts = {ExpertKey(0, 0): 1000, ExpertKey(0, 1): 1000, ExpertKey(0, 2): 1}
    drawn = workload.from_counts(counts, shape_of_counts({0: 8}), 2, 200, "")
    assert all(len(set(routed.experts)) == 2 for routed in drawn.layers)
    hot = sum(expert in (0, 1) for routed in drawn.layers for expert in routed.experts)
    assert hot >= 390
    assert all(expert <= 2 for routed in drawn.layers for expert in routed.experts)
    assert workload.from_counts(counts, shape_of_counts({0: 8}), 2, 200, "") == drawn


def test_without_counts_all_experts_are_drawn_alike() -> None:
    drawn = workload.from_counts({}, shape_of_counts({5: 4}), 2, 1000, "")
    times = [sum(expert in routed.experts for routed in drawn.layers) for expert in range(4)]
    assert all(430 <= count <= 570 for count in times)
    assert {routed.layer for routed in drawn.layers} == {5}


def test_the_layers_that_fit_are_whole_and_at_least_one(pack: moepack.Pack) -> None:
    layers = [RoutedLayer(0, (0, 1))] * 5
    two = sum(pack.locate(0, expert).length for expert in (0, 1))
    assert len(run.fit(pack, layers, 1)) == 1
    assert len(run.fit(pack, layers, two)) == 1
    assert len(run.fit(pack, layers, two + 1)) == 2
    assert len(run.fit(pack, layers, 1 << 40)) == 5


def test_the_surface_stays_inside_the_files(tmp_path: Path) -> None:
    files = [(tmp_path / "a", 300 << 10), (tmp_path / "b", 70 << 10)]
    for order in drive.ORDERS:
        ranges = drive.read_ranges(files, 64 << 10, order)
        drawn = [next(ranges) for _ in range(200)]
        assert {one.path.name for one in drawn} == {"a", "b"}
        for path, offset, length, _ in drawn:
            assert length == 64 << 10
            assert offset % length == 0
            assert offset + length <= dict(files)[path]
    sequential = drive.read_ranges(files, 64 << 10, "sequential")
    assert [next(sequential).offset >> 16 for _ in range(7)] == [0, 1, 2, 3, 0, 0, 1]
    assert {point.length for point in drive.grid(files)} == {64 << 10, 256 << 10}


def test_timed_reads_count_what_they_read_and_refuse_what_is_short(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(100_000))
    first = [FileRead(path, 0, 1000, 0), FileRead(path, 50_000, 2000, 4096)]
    groups = [[first, [FileRead(path, 9, 1, 0)]], [[FileRead(path, 7, 3, 0)]]]
    backend = ThreadedBackend(direct=False)
    scratch = Scratch(1, 8192)
    for depth in (1, 2, 4):
        usage = through_queue(backend, groups, depth, scratch)
        assert (usage.read_count, usage.length) == (4, 3004)
        assert usage.seconds > 0
        assert scratch.buffers[0][:3] == on_disk(groups[1][0][0])
        assert scratch.buffers[0][4096:6096] == on_disk(first[1])
    usage = through_maps(groups, [path], scratch)
    assert (usage.read_count, usage.length) == (4, 3004)
    assert scratch.buffers[0][4096:6096] == on_disk(first[1])
    usage = in_flight(backend, iter([FileRead(path, 0, 10, 0)] * 5), 2, 10, 60)
    assert usage.read_count == 5
    assert in_flight(backend, iter([FileRead(path, 0, 10, 0)] * 5), 2, 10, 0).read_count == 1
    with pytest.raises(MachineError, match="2000 bytes at byte 99000.*ends too early.*1,000"):
        through_queue(backend, [[[FileRead(path, 99_000, 2000, 0)]]], 4, scratch)
    with pytest.raises(MachineError, match="nothing.*cannot read: No such file"):
        through_queue(backend, [[[FileRead(tmp_path / "nothing", 0, 1, 0)]]], 4, scratch)
    backend.close()


def test_what_lies_in_memory_is_not_called_cold_and_gets_no_verdict() -> None:
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir():
        pytest.skip("no tmpfs")
    target = shared_memory / f"moepack-test-{os.getpid()}"
    source = first_shard("qwen3moe")
    try:
        pack_model([source], target)
        report = run.bench_pack(target, source=source, seconds=0, point_seconds=0)
    finally:
        shutil.rmtree(target)
    assert report.backend == "buffered"
    assert report.cold_is_assured is False
    assert report.verdict == "No verdict: the reads may have come from the page cache."


QUICK = ("--point-seconds", "0.002", "--length", "300KiB", "--seconds", "0")


def test_bench_compares_ends_with_a_verdict_and_draws(
    hot_pack: Path, cli: Run, tmp_path: Path
) -> None:
    require_disk(hot_pack)
    source = ("--source", first_shard("qwen3moe"))
    run = cli("bench", hot_pack, *source, *QUICK, "--plot", tmp_path / "s.svg")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "random reads, MiB/s by size and reads in flight" in lines
    assert any(line.startswith("note: a small pack: ") for line in lines)
    assert "drawn by the pack's hotness, 4 experts a layer" in run.stdout
    for layout in ("pack, blobs", "pack, parts", "shards"):
        assert len(re.findall(f"^{layout} +reader, cold", run.stdout, re.MULTILINE)) == 3
        assert len(re.findall(f"^{layout} +raw, cold", run.stdout, re.MULTILINE)) == 3
        assert len(re.findall(f"^{layout} +mapped, warm", run.stdout, re.MULTILINE)) == 1
    assert re.search(r"^1 round; raw and mapped reads go to 4 buffers of 2.0 MiB", run.stdout, re.M)
    assert len(re.findall("  too few rounds to tell$", run.stdout, re.MULTILINE)) == 9
    assert re.match(
        r"Not decided in 0 s: (there was time for 1 round, and it takes 9|in 1 of 1 round )",
        lines[-1],
    )
    assert "note: the comparison takes about 0 s" in run.stderr
    assert "a verdict takes more on this drive: --seconds 10" in run.stderr
    assert (tmp_path / "s.svg").read_text().startswith("<?xml")


def test_bench_in_json_holds_what_was_measured(hot_pack: Path, cli: Run) -> None:
    options = ("--trace", TRACE, "--depths", "2", "--backend", "buffered", "--json")
    source = ("--source", first_shard("qwen3moe"))
    run = cli("bench", hot_pack, *source, *QUICK, *options)
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["backend"] == "buffered"
    assert facts["routing"]["origin"] == f"trace {TRACE}"
    by_layout = {
        (one["layout"], one["way"], one["state"], one["depth"]): one for one in facts["readings"]
    }
    assert len(by_layout) == 15
    for way in ("reader", "raw"):
        blob, part, piece = (by_layout[one, way, "cold", 2] for one in ("blobs", "parts", "slices"))
        assert part["reads_per_token"] == pytest.approx(3 * blob["reads_per_token"])
        assert part["reads_per_token"] == piece["reads_per_token"]
        assert blob["bytes_per_second_lowest"] <= blob["bytes_per_second"]
        assert blob["bytes_per_second"] <= blob["bytes_per_second_highest"]
    assert facts["raw_buffers"]["length"] == 2 << 20
    assert facts["round_count"] == 1
    assert [gain["depth"] for gain in facts["gains"]] == [2, 2, 1, 1, 2]
    assert {gain["word"] for gain in facts["gains"]} == {"unproven"}
    assert {gain["low"] for gain in facts["gains"]} == {None}
    assert any("no direct reads here" in note for note in facts["notes"])


def test_bench_of_a_model_measures_its_shards_and_compares_nothing() -> None:
    shard = first_shard("qwen3moe")
    report = moepack.bench_pack(shard, seconds=0, point_seconds=0, length=100 << 10)
    assert report.pack == str(shard)
    assert (report.gains, report.packing_gains) == ((), None)
    assert report.verdict.startswith("No verdict: without a pack")
    assert {reads.layout for reads in report.readings} == {"blobs"}
    text = str(bench_text.text(report))
    assert re.search("^shards +reader, cold", text, re.MULTILINE)
    assert "pack, " not in text
    with pytest.raises(RequestError, match="not a pack, and nothing to compare") as caught:
        moepack.bench_pack(shard, source=shard, seconds=0, point_seconds=0)
    assert "moepack pack" in (caught.value.hint or "")


def test_one_call_does_all_that_the_command_does(hot_pack: Path) -> None:
    calls: list[tuple[int, int]] = []
    announced: list[Schedule] = []
    report = run.bench_pack(
        hot_pack,
        source=first_shard("qwen3moe"),
        hotness=str(FIXTURES / "qwen3moe-hotness.csv"),
        backend="buffered",
        depths=(3, 1, 3),
        seconds=0.6,
        length=100 << 10,
        point_seconds=0.001,
        progress=lambda count, total: calls.append((count, total)),
        announce=announced.append,
    )
    assert report.routing.origin.endswith("qwen3moe-hotness.csv, 4 experts a layer")
    assert report.backend == "buffered"
    assert "asked for" in report.why
    assert [gain.depth for gain in report.gains if gain.way == "reader"] == [1, 3, 1]
    assert len(report.readings) == 3 * 7
    assert sum(count for count, _ in calls) == calls[-1][1] >= 600
    (schedule,) = announced
    assert schedule.seconds == report.seconds == 0.6
    assert sum(schedule.sizes) >= report.routing.routed_layer_count


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"depths": ()}, "depths"),
        ({"depths": (1, 257)}, "depths.*256.*1,257"),
        ({"seconds": float("inf")}, "seconds"),
        ({"length": 0}, "length"),
        ({"point_seconds": float("nan")}, "seconds"),
        ({"trace": "t", "hotness": "h"}, "give one of them"),
    ],
)
def test_a_call_that_cannot_be_is_refused_before_anything_is_opened(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        run.bench_pack("no such pack", **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--depths", "1,,2"), "--depths: not a list of numbers"),
        (("--length", "many"), "not a size"),
        (("--plot", "s.pdf"), "not a picture"),
        (("--plot", "s.svg", "--point-seconds", "0"), "no surface to draw"),
    ],
)
def test_options_that_cannot_be_are_usage_errors(
    hot_pack: Path, cli: Run, options: tuple[str, ...], problem: str
) -> None:
    run = cli("bench", hot_pack, *options)
    assert run.returncode == 2
    assert problem in run.stderr


def test_plotting_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(MachineError, match="needs matplotlib") as caught:
        chart.check(str(tmp_path / "s.svg"))
    assert caught.value.hint == extras.hint("plot")
