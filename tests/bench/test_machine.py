"""A machine, measured: what is read, from where, and what is said of it."""

import math
import zlib
from pathlib import Path
from typing import Any

import pytest

from moepack.bench import machine as measuring
from moepack.bench.drive import LEAST_LENGTH, scratch_file
from moepack.bench.machine import LENGTHS, find_files, measure_bandwidth, measure_machine
from moepack.bench.steps import StepMeasurement
from moepack.common.errors import MachineError, RequestError
from moepack.host.gpus import NvidiaGpu
from moepack.pack.reading.pack import Pack
from moepack.packing.shard_index import index_model
from moepack.planning.machine.model import Drive, Figure, Gpu, ReadSpeed
from moepack.running import expert_cache
from moepack.storage.open_files import lies_in_memory
from tests.support.file_systems import mounted
from tests.support.gguf_builder import moe
from tests.support.models import first_shard
from tests.support.needs import needs_library, require_disk

MIB = 1 << 20


def test_the_scratch_file_cannot_be_compressed_and_goes_in_the_end(tmp_path: Path) -> None:
    pieces: list[None] = []
    with scratch_file(tmp_path, 20 * MIB, lambda: pieces.append(None)) as path:
        data = path.read_bytes()
        assert len(data) == 20 * MIB
        assert path.stat().st_blocks * 512 >= 20 * MIB
        assert len(zlib.compress(data, 1)) > len(data)
        assert data[: 4 * MIB] != data[16 * MIB :]
        assert len(pieces) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RequestError("no")])
def test_whatever_happens_the_scratch_file_is_removed(
    tmp_path: Path, error: BaseException | type[BaseException]
) -> None:
    def fail() -> None:
        with scratch_file(tmp_path, MIB):
            raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        fail()
    assert not list(tmp_path.iterdir())


def test_without_space_nothing_is_written(tmp_path: Path) -> None:
    with (
        mounted("tmpfs", tmp_path / "disk", 2 * LEAST_LENGTH - MIB) as disk,
        pytest.raises(MachineError) as refused,
        scratch_file(disk, 1 << 30),
    ):
        pass
    assert "not enough space for a file to read from, expected 512.0 MiB" in str(refused.value)
    assert "name a model on the drive" in (refused.value.hint or "")


@needs_library
@pytest.mark.parametrize("model", ["qwen3moe", "gpt-oss"])
def test_experts_are_read_of_a_pack_of_its_source_and_of_an_index(
    model: str, packs: dict[str, Path], tmp_path: Path
) -> None:
    shard = first_shard(model)
    with Pack(packs[model]) as pack:
        lengths = {one.expert_length for one in pack.shape.routed.values()}
    index_model(shard, tmp_path / "index")
    assert {path.suffix for path, _ in find_files(packs[model])} == {".bin"}
    assert {path.suffix for path, _ in find_files(shard)} == {".gguf"}
    for folder in (packs[model], tmp_path / "index"):
        with StepMeasurement(folder, is_buffered=True) as steps:
            assert {kind.length for kind in steps.kinds} <= lengths
            counts = [kind.depth for kind in steps.kinds]
            assert counts[0] == 1
            for kind in steps.kinds:
                assert steps.measure(kind, 0) > 0


@needs_library
def test_steps_miss_all_that_they_use(packs: dict[str, Path]) -> None:
    with StepMeasurement(packs["qwen3moe"], is_buffered=True) as steps:
        kind = steps.kinds[-1]
        before = steps._cache.usage
        steps.measure(kind, 0.05)
        after = steps._cache.usage
    assert kind.depth > 1
    hits, misses = after.hit_count - before.hit_count, after.miss_count - before.miss_count
    assert hits <= 0.05 * misses


def test_experts_that_all_stay_in_memory_measure_no_drive(tmp_path: Path) -> None:
    path = moe(layers=(0,), experts=2).write(tmp_path / "model.gguf")
    index_model(path, tmp_path / "index")
    with pytest.raises(RequestError, match="too few experts to measure"):
        StepMeasurement(tmp_path / "index", is_buffered=True)
    measured = measure_machine(path, seconds=0)
    assert measured.machine.drive is None
    assert "too few experts" in measured.notes[0]


def test_without_a_compiler_all_else_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_library(name: str) -> Path:
        raise MachineError("no C compiler is installed", hint="apt install gcc")

    monkeypatch.setattr(expert_cache, "find_library", find_library)
    measured = measure_machine(first_shard("qwen3moe"), seconds=0.01)
    assert measured.machine.drive is None
    assert measured.machine.compute is not None
    note = "the drive was not measured: no C compiler is installed; apt install gcc"
    assert note in measured.notes


@needs_library
def test_progress_reaches_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where something takes no time at all."""
    monkeypatch.setattr(measuring, "measure_bandwidth", lambda *_, **__: None)
    monkeypatch.setattr(measuring, "MEMORY_SHARE", 0.99)
    calls: list[tuple[int, int]] = []
    measure_machine(
        directory=tmp_path, seconds=9, scratch_length=MIB, progress=lambda *of: calls.append(of)
    )
    assert sum(count for count, _ in calls) == calls[-1][1] >= 9000


@needs_library
def test_without_a_model_the_drive_of_a_folder_is_measured(tmp_path: Path) -> None:
    require_disk(tmp_path)
    measured = measure_machine(directory=tmp_path, seconds=0, scratch_length=64 * MIB)
    drive = measured.machine.drive
    assert drive is not None
    assert drive.path == str(tmp_path)
    assert {read.length for read in drive.reads} >= set(LENGTHS[:3])
    assert {read.depth for read in drive.reads} >= {1}
    for read in drive.reads:
        speed = read.bandwidth
        assert speed.basis == "measured"
        assert 0 < (speed.lowest or 0) <= speed.value <= (speed.highest or 0)
    assert "less than 1 GiB to read from: a drive's own memory may hold much of it" in (
        measured.notes
    )
    assert measured.machine.memory.basis == "read"
    assert measured.machine.memory_bandwidth is not None
    assert not list(tmp_path.iterdir())


def test_files_in_memory_are_no_drive_and_gpus_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or not lies_in_memory(memory):
        pytest.skip("there is no file system in memory")
    gpus = NvidiaGpu("A", 24, 9e11, 3e10), NvidiaGpu(None, 8, None, None)
    monkeypatch.setattr(measuring, "find_gpus", lambda: (gpus, None))
    monkeypatch.setattr(measuring, "measure_bandwidth", lambda *_, **__: None)
    measured = measure_machine(directory=memory, seconds=0, scratch_length=MIB)
    assert measured.machine.drive is None
    assert measured.backend is None
    assert any("the drive was not measured" in note for note in measured.notes)
    assert measured.machine.gpus == (
        Gpu("A", Figure(24, "read"), Figure(9e11, "read"), Figure(3e10, "read")),
        Gpu(None, Figure(8, "read"), None),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"seconds": value}, "not a time in seconds") for value in (-1.0, math.nan, math.inf)),
        ({"directory": "/no"}, "no such folder"),
        ({"model": first_shard("qwen3moe"), "directory": "/"}, "a model and a directory at once"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        measure_machine(**options)


def test_a_spread_is_worth_a_word() -> None:
    steady = Figure(1.2e9, "measured", 1e9, 1.5e9)
    unsteady = Figure(1.2e9, "measured", 1e9, 2.5e9)
    reads = [ReadSpeed(4096, depth, steady) for depth in (1, 2, 4)]
    assert list(measuring._notes(Drive(None, None, tuple(reads)), steady)) == []
    reads.append(ReadSpeed(4096, 8, unsteady))
    assert list(measuring._notes(Drive(None, None, tuple(reads)), unsteady)) == [
        "the drive is shared or throttled: the same reads took up to 2.5 times as long as before "
        "(more than 1.5 times for 1 of 4 kinds of reads)",
        "the memory is busy: reading it took up to 2.5 times as long as before",
    ]
    assert list(measuring._notes(None, None)) == [
        "the bandwidth of memory was not measured: too little memory is free"
    ]


def test_without_memory_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "available_memory", lambda: 100 * MIB)
    assert measure_bandwidth(0) is None


def test_the_memory_of_this_machine_is_slower_than_its_caches_and_faster_than_drives() -> None:
    figure = measure_bandwidth(0)
    if figure is None:
        pytest.skip("there is too little memory here")
    assert 0.5e9 < (figure.lowest or 0) <= figure.value <= (figure.highest or 0) < 20e12
