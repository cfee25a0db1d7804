"""Pages of a small pack with everything: its files, its measurements, and how a page is made."""

import json
from pathlib import Path

import moepack
from moepack.planning.machine.file import toml_text
from moepack.report.html.report import ReportPage
from tests.support.machines import machine
from tests.support.models import FIXTURES, first_shard

TRACE = FIXTURES / "qwen3moe-trace.csv"
SURFACE = [
    {"length": length, "depth": depth, "order": order, "bytes_per_second": 1e6 * length * depth,
     "cpu_seconds_per_gib": 0.5, "read_count": 9}
    for order in ("random", "sequential") for length in (65536, 1 << 20) for depth in (1, 4)
]  # fmt: skip


def bench() -> dict[str, object]:
    """Return what `bench --json` prints, of a surface and one reading."""
    reading = {
        **{"layout": "blobs", "depth": 1},
        **{"bytes_per_second": 5e8, "bytes_per_second_lowest": 4e8},
        **{"bytes_per_second_highest": 6e8, "cpu_seconds_per_gib": 0.2},
        **{"seconds_per_token": 0.01, "reads_per_token": 8, "length_per_token": 4e5},
    }
    routing = {
        "origin": "drawn by /somewhere/my/hot.csv, 8 experts a layer",
        "routed_layer_count": 9,
        "portion_count": 2,
        "token_count": 4.5,
        "useful_length": 1 << 20,
    }
    return {
        **{"pack": "/somewhere/model.moepack", "pack_length": 1 << 21, "backend": "direct"},
        **{"why": "it works", "surface": SURFACE, "readings": [reading]},
        "routing": routing,
        **{"cold_is_assured": None, "round_count": 12, "gains": []},
        **{"seconds": 20, "outcome": None},
        **{"verdict": "no gain was shown", "notes": []},
    }


def write_inputs(folder: Path) -> None:
    """Write a pack, a machine and measurements into a folder."""
    hotness = FIXTURES / "qwen3moe-hotness.csv"
    moepack.pack_model(first_shard("qwen3moe"), folder / "model.moepack", hotness=hotness)
    box = machine(memory=16, bandwidth=40, vram=8, vram_bandwidth=400, drive=3)
    (folder / "machine.toml").write_text(toml_text(box))
    (folder / "bench.json").write_text(json.dumps(bench()))


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
