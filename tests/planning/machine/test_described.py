"""Machines by presets, and by figures that are typed."""

import re
from pathlib import Path
from typing import Any

import pytest

from moepack.common.errors import RequestError
from moepack.planning.machine import described
from moepack.planning.machine.described import (
    describe_machine,
    find_machine,
    preset_names,
    presets,
)
from moepack.planning.machine.model import Drive, Figure
from tests.support.machines import write_machine
from tests.support.values import some

GIB, GB = 1 << 30, 10**9
HALO = "preset:strix-halo-128"
FILES = sorted(Path(described.__file__).with_name("presets").glob("*.toml"))


def test_every_preset_is_a_machine() -> None:
    assert [one.name for one in presets().presets] == preset_names() == [f.stem for f in FILES]
    for _, machine in presets().presets:
        assert some(machine.name)
        assert some(machine.memory_bandwidth).basis == "typed"
        assert all(gpu.bandwidth for gpu in machine.gpus)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_figure_of_a_preset_has_its_source(path: Path) -> None:
    """Lengths that a buyer chooses need none: their number is in the preset's name."""
    for line in path.read_text().splitlines():
        is_chosen = re.fullmatch(r'length = "(\d+) GiB"', line)
        if re.match("(bandwidth|link|compute|length) =", line) and not is_chosen:
            assert re.search(r'" {2}# .{10}', line), line


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("preset:", "no such preset, expected dgx-spark, ", None),
        ("preset:strix-halo", "no such preset", f"did you mean {HALO}?"),
        ("dgx-spark", "dgx-spark: no such file", "did you mean preset:dgx-spark?"),
        ("missing.toml", "missing.toml: cannot read", None),
    ],
)
def test_an_unknown_machine_is_named_with_those_that_are_known(
    name: str, message: str, hint: str | None
) -> None:
    with pytest.raises(RequestError) as refused:
        find_machine(name)
    assert str(refused.value).startswith(message)
    assert refused.value.hint == hint


def test_typed_figures_replace_those_of_the_machine(tmp_path: Path) -> None:
    path = write_machine(tmp_path / "m.toml", bandwidth=40, vram=24, vram_bandwidth=900, drive=3)
    plain = find_machine(path)
    assert describe_machine(path) == plain
    other = describe_machine(
        path,
        memory="128GiB",
        vram=["16GiB", "8GiB"],
        memory_bandwidth="80GB/s",
        vram_bandwidth="1 TB/s",
        drive_speed="7 GB/s",
    )
    assert other.memory == Figure(128 * GIB, "typed")
    assert other.memory_bandwidth == Figure(80 * GB, "typed")
    assert [gpu.memory.value for gpu in other.gpus] == [16 * GIB, 8 * GIB]
    assert [some(gpu.bandwidth).value for gpu in other.gpus] == [1000 * GB] * 2
    assert other.drive == Drive(None, Figure(7 * GB, "typed"))
    alone = describe_machine(memory=1 << 35)
    assert (alone.memory.value, alone.memory_bandwidth, alone.gpus, alone.drive) == (
        *(1 << 35, None),
        *((), None),
    )


def test_of_unified_memory_a_gpu_keeps_its_share() -> None:
    for name, share in ((HALO, 1.0), ("preset:mac-m4-max-128", 0.75)):
        (gpu,) = describe_machine(name, memory="64GiB").gpus
        assert gpu.memory.value == share * 64 * GIB


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({}, "the amount of memory is unknown"),
        ({"memory": "64GiB", "drive_speed": "7"}, "drive_speed: not a bandwidth"),
        (
            {"memory": "64GiB", "memory_bandwidth": "64GiB"},
            "memory_bandwidth: unknown unit",
        ),
        ({"memory": "64GiB", "vram": "x"}, "vram: not a size"),
        ({"machine": HALO, "vram": ["64GiB", "8GiB"]}, "unified memory has one GPU"),
        ({"machine": HALO, "vram": "129GiB"}, "vram: more than the memory, expected up to 124.9"),
        ({"machine": HALO, "memory": "64GiB", "vram": "65GiB"}, "vram: more than the memory"),
    ],
)
def test_impossible_figures_are_refused(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        describe_machine(**figures)
