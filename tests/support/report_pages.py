"""Pages of a small pack with everything: its files, its measurements, and how a page is made."""

from pathlib import Path
from typing import Any

import moepack
from moepack.planning.machine.file import toml_text
from moepack.report.facts import json_text
from moepack.report.html.report import ReportPage
from tests.support.machines import machine
from tests.support.models import FIXTURES, first_shard

TRACE = FIXTURES / "qwen3moe-trace.csv"


def write_inputs(folder: Path) -> None:
    """Write a pack, a machine and measurements into a folder."""
    hotness = FIXTURES / "qwen3moe-hotness.csv"
    moepack.pack_model(first_shard("qwen3moe"), folder / "model.moepack", hotness=hotness)
    box = machine(memory=16, bandwidth=40, vram=8, vram_bandwidth=400, drive=3)
    (folder / "machine.toml").write_text(toml_text(box))
    little: Any = {"seconds": 0, "point_seconds": 0.001, "depths": [1], "length": 1 << 16}
    measured = moepack.bench_pack(folder / "model.moepack", hotness=hotness, **little)
    (folder / "bench.json").write_text(json_text(measured))


def make(folder: Path, output: Path | None = None) -> ReportPage:
    """Make a page of the files in a folder, with every section."""
    pack = folder / "model.moepack"
    return moepack.make_report(
        pack,
        output,
        traces=TRACE,
        machine=folder / "machine.toml",
        runs=folder / "bench.json",
        budget="50%",
    )
