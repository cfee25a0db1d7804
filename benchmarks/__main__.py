"""`python -m tests.bench`: print a table of ratios, each measured in one run."""

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import copies, models, opening, reading, tracing
from benchmarks.measure import OtherLoad, Row

SHARED_MEMORY = Path("/dev/shm")
FRESH_ROUNDS = 15
TRACE_LENGTH = 100_000_000


def main() -> None:
    """Measure, print each row as it is known, and end with the limits that are not met."""
    options = _options()
    rows = []
    load = OtherLoad()
    print(_machine(options.folder), end="\n\n")
    print(_line(("what: against what", "moepack", "peer", "ratio (spread)", "limit", "")))
    with tempfile.TemporaryDirectory(prefix="moepack-bench-", dir=options.folder) as folder:
        for row in _rows(Path(folder), options.layers, options.rounds):
            print(_line((row.name, *row.values, row.limit, row.verdict)), flush=True)
            rows.append(row)
    if (share := load.share()) is not None:
        print(
            f"\nother processes took {share:.0%} of the CPUs meanwhile: near 0 %, or measure again"
        )
    print("limits met:", sum(row.met is True for row in rows))
    for row in rows:
        if row.met is False:
            print("NOT met:", row.name, row.limit)


def _rows(folder: Path, layers: int, rounds: int) -> Iterator[Row]:
    yield from opening.starting(FRESH_ROUNDS)
    yield from opening.sources(folder, FRESH_ROUNDS)
    yield from opening.packs(folder, FRESH_ROUNDS)
    yield from tracing.working_set(folder, TRACE_LENGTH, rounds)
    yield from tracing.formats(folder, TRACE_LENGTH // 2, rounds)
    shards = models.write_model(folder, layers)
    hotness = models.write_hotness(folder / "hotness.csv", layers)
    yield from copies.packing("disk", shards, hotness, folder, rounds)
    yield from copies.verifying(shards, folder, 2 * rounds)
    yield from reading.first_expert(folder / "many", FRESH_ROUNDS)
    yield from reading.packs_against_shards(folder / "layers", shards, 2 * rounds)
    yield from reading.against_fio(shards[0], rounds)
    for name in ("copy", *copies.LAYOUTS):
        shutil.rmtree(folder / name)
    yield from _on_tmpfs(shards, hotness, rounds)


def _on_tmpfs(shards: list[Path], hotness: Path, rounds: int) -> Iterator[Row]:
    length = sum(shard.stat().st_size for shard in shards)
    if not SHARED_MEMORY.is_dir() or _free_memory() < 4 * length:
        yield Row("pack, tmpfs", ("no room", "", ""))
        return
    with tempfile.TemporaryDirectory(prefix="moepack-bench-", dir=SHARED_MEMORY) as name:
        folder = Path(name)
        moved = [Path(shutil.move(shard, folder / shard.name)) for shard in shards]
        yield from copies.packing("tmpfs", moved, hotness, folder, rounds)


def _free_memory() -> int:
    """Give the bytes that fit into shared memory: it is memory, and limited beside that."""
    meminfo = Path("/proc/meminfo").read_text().split()
    available = int(meminfo[meminfo.index("MemAvailable:") + 1]) * 1024
    return min(available, shutil.disk_usage(SHARED_MEMORY).free)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--layers", type=int, default=6, help="of the model, 0.37 GB each")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each side")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    return parser.parse_args()


def _machine(folder: Path) -> str:
    facts = {
        "machine": f"{_processor()}, {os.cpu_count()} CPUs",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": _file_system(folder),
        "python": platform.python_version(),
    }
    return "\n".join(f"{name + ':':13}{fact}" for name, fact in facts.items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """Name the type of the file system that holds `folder`."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return f"unknown ({sys.platform})"
    resolved = folder.resolve()
    holding = [(len(at), kind) for at, kind in mounts if resolved.is_relative_to(at)]
    return max(holding)[1]


def _line(cells: tuple[str, ...]) -> str:
    widths = (40, 21, 21, 22, 12, 0)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


main()
