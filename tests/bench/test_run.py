"""`moepack bench`: the same experts on both sides, honest verdicts, what a person gets to see."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.bench import comparison, run, workload
from moepack.bench.drive import Usage, in_flight
from moepack.bench.measuring import Meter
from moepack.bench.workload import Groups, RoutedLayer
from moepack.common.errors import MachineError, RequestError, TraceError
from moepack.pack.opening.open_model import open_shards
from moepack.pack.reading.expert_read import FileRead
from moepack.report import measure_text
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
def test_slices_are_the_bytes_of_the_same_experts_as_blobs(
    model: str, packs: dict[str, Path]
) -> None:
    with moepack.open(packs[model]) as pack, open_shards(first_shard(model)) as source:
        layers = [RoutedLayer(layer, (3, 0, 1)) for layer in pack.layers]
        slices = workload.slices(source, pack, layers)
        blobs = workload.blobs(pack, layers)
    for (blob,), expert in zip(contents(blobs), contents(slices), strict=True):
        assert len(expert) > 1
        assert len(blob) >= sum(map(len, expert))
        assert all(part in blob for part in expert)


def test_the_source_of_another_pack_is_refused(pack: moepack.Pack) -> None:
    with open_shards(first_shard("mixtral")) as other, pytest.raises(RequestError) as refused:
        workload.slices(other, pack, [RoutedLayer(0, (1,))])
    assert "layer 0: the pack was not made from this source" in str(refused.value)


def test_both_sides_of_a_pair_read_the_same_and_begin_equally_often(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    visits: list[tuple[bool, slice]] = []
    read = comparison._read

    def watched(reader: moepack.Reader, groups: Groups, portion: slice) -> Usage:
        visits.append((groups[0][0].is_blob, portion))
        return read(reader, groups, portion)

    monkeypatch.setattr(comparison, "_read", watched)
    monkeypatch.setattr(comparison, "PORTION_LENGTH", 1)
    with moepack.open(packs["qwen3moe"]) as pack, open_shards(first_shard("qwen3moe")) as source:
        layers = [RoutedLayer(0, (number,)) for number in range(3)]
        sides = {
            "blobs": workload.blobs(pack, layers),
            "slices": workload.slices(source, pack, layers),
        }
        meter = Meter(0.2, None)
        rounds, portions, _ = comparison.compare(pack, sides, "direct", (1, 4), 0.2, meter)
    count = len(portions)
    visits = visits[2 * count :]  # the others warm up
    assert len(visits) == 4 * len(rounds)
    for number, ((is_blob, portion), (other_is_blob, other)) in enumerate(
        zip(visits[::2], visits[1::2], strict=True)
    ):
        assert portion == other == portions[number % count]
        assert (is_blob, other_is_blob) == (number % 4 < 2, number % 4 >= 2)


def test_traces_are_read_token_by_token(tmp_path: Path) -> None:
    reads = workload.from_trace(str(TRACE), shape_of_counts({0: 16, 1: 16}), 3)
    lines = [line.split(",") for line in TRACE.read_text().splitlines()[1:]]
    tokens = list(dict.fromkeys((line[0], line[1]) for line in lines))[:3]
    expected = [
        RoutedLayer(int(line[2]), tuple(map(int, line[4].split())))
        for token in tokens
        for line in sorted(lines, key=lambda line: int(line[2]))
        if (line[0], line[1]) == token
    ]
    assert (reads.layers, reads.token_count) == (expected, 3)
    (tmp_path / "route.csv").write_text(BIG_MOE)  # with one expert a line
    reads = workload.from_trace(str(tmp_path / "route.csv"), shape_of_counts({0: 16, 1: 16}), 10)
    assert (reads.layers, reads.token_count) == ([(0, (5, 3)), (1, (15,)), (0, (5,))], 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BIG_MOE.replace("0,1,0,1,0,15", "0,1,0,1,0,16"), "line 6.*no such expert.*expert 16"),
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


def test_timed_reads_count_what_they_read_and_refuse_what_is_short(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(100_000))
    backend = ThreadedBackend(direct=False)
    several = [FileRead(path, 1000 * number, 10 + number, 0) for number in range(5)]
    for depth in (1, 2, 8):
        usage = in_flight(backend, iter(several), depth, 20, 60)
        assert (usage.read_count, usage.length) == (5, 60)
        assert usage.seconds > 0
    assert in_flight(backend, iter(several), 2, 20, 0).read_count == 1
    for wrong, problem in (
        (FileRead(path, 99_000, 2000, 0), "2000 bytes at byte 99000.*ends too early.*1,000"),
        (FileRead(tmp_path / "nothing", 0, 1, 0), "nothing.*cannot read: No such file"),
    ):
        with pytest.raises(MachineError, match=problem):
            in_flight(backend, iter([wrong]), 4, 2000, 60)
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


def test_bench_compares_and_ends_with_a_verdict(hot_pack: Path, cli: Run) -> None:
    require_disk(hot_pack)
    source = ("--source", first_shard("qwen3moe"))
    run = cli("bench", hot_pack, *source, *QUICK)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "random reads, MiB/s by size and reads in flight" in lines
    assert any(line.startswith("note: a small pack: ") for line in lines)
    assert "drawn by the pack's hotness, 4 experts a layer" in run.stdout
    for layout in ("pack", "shards"):
        assert len(re.findall(f"^{layout} +[0-9]+ +[0-9,]+ +", run.stdout, re.MULTILINE)) == 3
    assert "1 round, with moepack's reader" in lines
    assert len(re.findall("  too few rounds to tell$", run.stdout, re.MULTILINE)) == 3
    assert re.match(
        "No difference shown: there was time for 1 round, and it takes 12; measure ",
        lines[-1],
    )


def test_bench_in_json_holds_what_was_measured(hot_pack: Path, cli: Run) -> None:
    options = ("--trace", TRACE, "--depths", "2", "--backend", "buffered", "--json")
    source = ("--source", first_shard("qwen3moe"))
    run = cli("bench", hot_pack, *source, *QUICK, *options)
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["backend"] == "buffered"
    assert facts["routing"]["origin"] == f"trace {TRACE}"
    blobs, slices = facts["readings"]
    assert (blobs["layout"], slices["layout"]) == ("blobs", "slices")
    assert slices["reads_per_token"] == pytest.approx(3 * blobs["reads_per_token"])
    assert blobs["bytes_per_second_lowest"] <= blobs["bytes_per_second"]
    assert blobs["bytes_per_second"] <= blobs["bytes_per_second_highest"]
    assert facts["round_count"] == 1
    (gain,) = facts["gains"]
    assert (gain["depth"], gain["word"], gain["low"]) == (2, "none", None)
    assert any("no direct reads here" in note for note in facts["notes"])


def test_bench_of_a_model_measures_its_shards_and_compares_nothing() -> None:
    shard = first_shard("qwen3moe")
    report = moepack.bench_pack(shard, seconds=0, point_seconds=0, length=100 << 10)
    assert report.pack == str(shard)
    assert (report.gains, report.outcome) == ((), None)
    assert report.verdict.startswith("No verdict: without a pack")
    assert {reads.layout for reads in report.readings} == {"slices"}
    text = str(measure_text.bench(report))
    assert re.search("^shards +1 ", text, re.MULTILINE)
    assert not re.search("^pack ", text, re.MULTILINE)
    with pytest.raises(RequestError, match="not a pack, and nothing to compare") as caught:
        moepack.bench_pack(shard, source=shard, seconds=0, point_seconds=0)
    assert "moepack pack" in (caught.value.hint or "")


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
