"""All that `make bench` measures, by its parts. Each has a folder of its own."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import moepack
from benchmarks import (
    as_it_comes,
    copies,
    elsewhere,
    header,
    models,
    opening,
    reading,
    routed,
    two_drives,
)
from benchmarks.table import Row

FRESH_ROUNDS = 15


class Options(NamedTuple):
    """How much is measured: the layers of a model of 0.37 GB each, and the rounds.

    A model repeats the routing of `trace`, or one that is made up.
    """

    layers: int
    rounds: int
    trace: Path | None


Part = Callable[[Path, Options], Iterator[Row]]


def _starting(folder: Path, options: Options) -> Iterator[Row]:
    yield from opening.starting(FRESH_ROUNDS)
    yield from opening.sources(folder, FRESH_ROUNDS)
    yield from opening.packs(folder, FRESH_ROUNDS)
    yield from reading.first_expert(folder / "many", FRESH_ROUNDS)


def _digests(folder: Path, options: Options) -> Iterator[Row]:
    yield from header.digests(folder, FRESH_ROUNDS)


def _packing(folder: Path, options: Options) -> Iterator[Row]:
    shards = models.write_model(folder, options.layers)
    yield _model_row(shards, options)
    hotness = models.write_hotness(folder / "hotness.csv", options.layers)
    yield from copies.packing(shards, hotness, folder, options.rounds)
    yield from copies.verifying(shards, folder, 2 * options.rounds)
    yield from copies.giving_back(folder, options.rounds)


def _reading(folder: Path, options: Options) -> Iterator[Row]:
    yield Row("blobs", "", note="a pack of 1 GiB, read twice a round; maps are read once")
    yield from as_it_comes.from_the_drive(folder, options.rounds)


def _shards(folder: Path, options: Options) -> Iterator[Row]:
    shards = models.write_model(folder, options.layers)
    yield _model_row(shards, options)
    moepack.pack_model(shards, folder / "model.moepack")
    yield from reading.packs_against_shards(folder / "model.moepack", shards, options.rounds)


def _network(folder: Path, options: Options) -> Iterator[Row]:
    shards = models.write_model(folder, options.layers)
    yield _model_row(shards, options)
    yield from elsewhere.rows(folder, shards, options.rounds)


def _drives(folder: Path, options: Options) -> Iterator[Row]:
    yield from two_drives.mirrored(folder, options.rounds)


def _routed(folder: Path, options: Options) -> Iterator[Row]:
    yield from routed.models(folder, options.rounds, options.trace)


def _model_row(shards: list[Path], options: Options) -> Row:
    length = sum(shard.stat().st_size for shard in shards)
    text = f"the dimensions of Qwen3-30B-A3B, {options.layers} layers"
    return Row("model", "", note=f"{text}, {length / 1e9:.1f} GB in {len(shards)} shards")


PARTS: dict[str, Part] = {
    "starting": _starting,
    "digests": _digests,
    "packing": _packing,
    "reading": _reading,
    "shards": _shards,
    "network": _network,
    "drives": _drives,
    "routed": _routed,
}


def rows(folder: Path, parts: list[str], options: Options) -> Iterator[Row]:
    """Measure one part after another, with files in `folder`, and yield what was found."""
    for name in parts:
        (folder / name).mkdir()
        yield from PARTS[name](folder / name, options)
        shutil.rmtree(folder / name)
