"""All layouts get the same memory, and the whole of `bench` on a drive of which all is known."""

import itertools
import mmap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import moepack
from moepack.bench import comparison, layouts, run, workload
from moepack.bench.comparison import Rig
from moepack.bench.rounds import Condition, Measurement
from moepack.bench.run import BenchReport
from moepack.bench.timed_reads import HUGE_PAGE, Scratch
from moepack.pack.reading.pack import Pack
from moepack.source.shards import Source, open_source
from moepack.storage import page_cache
from moepack.storage.aligned_read import address
from moepack.storage.threaded import ThreadedBackend, ThreadedQueue
from tests.support.gguf_builder import moe, split, write_shards
from tests.support.needs import require_disk
from tests.support.synthetic_drive import (
    CALM,
    SyntheticDrive,
    nothing_is_cached,
)

DEPTHS = (1, 4)
SECONDS = 0.2
"""Of the drive's time: some 50 rounds of these small reads."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pack, Source]]:
    """Build a model of a few large enough experts, and a pack of it."""
    folder = tmp_path_factory.mktemp("model")
    shards = write_shards(split(moe(experts=4, ne=(256, 64)), 6), folder)
    moepack.pack_model(shards, folder / "pack")
    source = open_source(shards)
    with moepack.open(folder / "pack") as pack:
        yield pack, source


def measured(model: tuple[Pack, Source], factor: float) -> BenchReport:
    """Run all of `bench` on a drive on which shards take `factor` times as long as packs."""
    drive = SyntheticDrive(0, CALM, factor, lambda path: path.suffix == ".gguf")
    rig = Rig(drive.backend, drive.clock, drive.disturbance)
    reads = workload.from_counts({}, model[0].shape, 2, 1, "")
    settings = run.Settings(DEPTHS, seconds=SECONDS, length=100 << 10, point_seconds=0)
    with nothing_is_cached():
        return run.measure_pack(*model, reads, rig, settings)


def test_what_is_measured_is_what_the_drive_does(model: tuple[Pack, Source]) -> None:
    """One latency each for three slices against one for a blob, and more bytes by rounding."""
    before, after = (
        {
            (gain.way, gain.depth): gain
            for gain in measured(model, factor).gains
            if gain.way in ("reader", "raw") and gain.state == "cold"
        }
        for factor in (1.0, 1.3)
    )
    ratios = {key: gain.ratio or 0 for key, gain in before.items()}
    assert all(1 < ratios[way, 4] < ratios[way, 1] < 3 for way in ("reader", "raw"))
    assert ratios["raw", 1] == pytest.approx(ratios["reader", 1], rel=0.02)
    for key, ratio in ratios.items():
        assert after[key].ratio == pytest.approx(1.3 * ratio, rel=0.02)
        assert after[key].word == "gain"


def test_all_layouts_get_the_same_buffers_and_whole_pages(
    model: tuple[Pack, Source],
) -> None:
    """Raw: an expert's reads lie one behind the other in a buffer, and buffers take turns."""
    pack, source = model
    layers = workload.from_counts({}, pack.shape, 3, 2, "").layers
    groups = {
        "blobs": layouts.blobs(pack, layers),
        "parts": layouts.parts(pack, layers),
        "slices": layouts.slices(source, pack, layers),
    }
    portions = {layout: layouts.portions(one, [len(layers)]) for layout, one in groups.items()}
    drive = SyntheticDrive(0, CALM, 1.0)
    with comparison.open_ways(pack, drive.backend, DEPTHS, portions, drive.clock) as opened:
        buffers = opened.buffers
        assert buffers.count == 3
        assert buffers.length % HUGE_PAGE == 0
        for depth in DEPTHS:
            used = {}
            for layout in groups:
                drive.requests.clear()
                opened.read(
                    Measurement(layout, Condition("raw", "cold", depth)), portions[layout][0]
                )
                used[layout] = Counter(
                    address(one.buffer) // buffers.length
                    for one in drive.requests
                    if not address(one.buffer) % buffers.length
                )
                assert not any(address(one.buffer) % mmap.PAGESIZE for one in drive.requests)
                assert not any(one.offset % mmap.PAGESIZE for one in drive.requests)
            assert used["blobs"] == used["parts"] == used["slices"]
            assert len(used["blobs"]) == 3


def test_buffers_hold_the_longest_expert_of_any_layout(
    model: tuple[Pack, Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "HUGE_PAGE", mmap.PAGESIZE)  # else there is room to spare
    pack, source = model
    layers = workload.from_counts({}, pack.shape, 3, 2, "").layers
    portions = {
        "blobs": layouts.portions(layouts.blobs(pack, layers), [len(layers)]),
        "slices": layouts.portions(layouts.slices(source, pack, layers), [len(layers)]),
    }
    drive = SyntheticDrive(0, CALM, 1.0)
    assert portions["slices"][0].longest > portions["blobs"][0].longest
    with comparison.open_ways(pack, drive.backend, DEPTHS, portions, drive.clock) as opened:
        assert opened.buffers.length == portions["slices"][0].longest
        assert opened.warm_up(portions, 1) == 1


def test_scratch_begins_on_huge_pages_and_has_been_touched() -> None:
    scratch = Scratch(3, 5000)
    assert scratch.length == 8192
    starts = [address(buffer) for buffer in scratch.buffers]
    assert starts[0] % HUGE_PAGE == 0
    assert [second - first for first, second in itertools.pairwise(starts)] == [8192, 8192]
    share = scratch.huge_page_share()
    assert share is None or 0 <= share <= 1
    assert {len(buffer) for buffer in scratch.buffers} == {8192}


def test_huge_pages_are_there_where_the_system_gives_them() -> None:
    """On a machine that gives them to all: what is asked for alone may come to nothing."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this system has none to give")
    assert (Scratch(4, HUGE_PAGE).huge_page_share() or 0) > 0.5


@pytest.mark.parametrize("before", [("reader", "warm"), ("mapped", "cold"), ("raw", "cold")])
def test_what_was_cached_is_dropped_before_a_cold_reading(
    before: tuple[str, str], model: tuple[Pack, Source]
) -> None:
    pack, _ = model
    require_disk(pack.path)
    layers = workload.from_counts({}, pack.shape, 3, 2, "").layers
    portions = {"blobs": layouts.portions(layouts.blobs(pack, layers), [len(layers)])}
    paths = portions["blobs"][0].paths
    shares: list[float | None] = []

    class Watching(ThreadedBackend):
        """Looks into the page cache when a reading begins."""

        def queue(self, depth: int) -> ThreadedQueue:
            shares.append(page_cache.cached_share(paths))
            return super().queue(depth)

    with comparison.open_ways(pack, lambda _: Watching(direct=False), (1,), portions) as opened:
        opened.read(Measurement("blobs", Condition(*before, 1)), portions["blobs"][0])
        if page_cache.cached_share(paths) in (None, 0):
            pytest.skip("this file system's cache cannot be seen")
        opened.read(Measurement("blobs", Condition("raw", "cold", 1)), portions["blobs"][0])
        assert shares[-1] == 0
        assert opened.was_cold
