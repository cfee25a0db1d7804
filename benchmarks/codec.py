"""`python -m benchmarks.codec`: what the codec zstd saves of experts by type, and what it costs.

Weights are random and normal, quantised by llama.cpp itself. Each side of a ratio is measured in
turns with the other, in one run. With --model it says what gets shorter in a model instead.
"""

import argparse
import ctypes
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

import moepack
from benchmarks import models
from benchmarks.measure import limit_row, speed_row
from benchmarks.models import N_FF, NE0
from benchmarks.table import HEADING, Row, cells, line
from moepack.bench.measuring import in_turns
from moepack.pack.reading.locations import PartLocation
from moepack.storage import page_cache
from tests.support import llama_cpp
from tests.support.gguf_builder import TensorSpec

SIGMA = 0.02
UNLIKE = 4
"""Experts that are unlike; the others are the same again, and parts are compressed one by one."""

AT_ONCE = models.USED
"""Experts that are asked for together."""

LEVEL = 3


class Type(NamedTuple):
    """A type of GGML: its number, and the elements and bytes of its blocks."""

    number: int
    elements: int
    length: int


TYPES = {
    "F32": Type(0, 1, 4),
    "F16": Type(1, 1, 2),
    "BF16": Type(30, 1, 2),
    "Q8_0": Type(8, 32, 34),
    "Q6_K": Type(14, 256, 210),
    "Q5_K": Type(13, 256, 176),
    "Q4_K": Type(12, 256, 144),
    "Q3_K": Type(11, 256, 110),
    "Q2_K": Type(10, 256, 84),
    "MXFP4": Type(39, 32, 17),
}


def rows(folder: Path, type_name: str, length: int, rounds: int) -> Iterator[Row]:
    """Measure experts of one type, `length` bytes of them, with files in `folder`."""
    source = write_model(folder / f"{type_name}.gguf", TYPES[type_name], length)
    plain, coded = folder / "plain", folder / "coded"
    packed = in_turns(
        {
            "plain": partial(_pack, source, plain, None),
            "coded": partial(_pack, source, coded, f"zstd:{LEVEL}"),
        },
        rounds,
    )
    saved = 1 - packed["coded"][0].share
    yield Row(f"{type_name}: saved in a pack, zstd:{LEVEL}", f"{saved:.1%}")
    for level in (1, LEVEL, 9, 19):
        yield Row(f"{type_name}: zstd:{level} alone", f"{_saved(source, level):.1%}")
    speeds = {side: [length / run.seconds for run in runs] for side, runs in packed.items()}
    yield speed_row(f"{type_name}, pack: plain", speeds["coded"], speeds["plain"])
    if not saved:
        return
    yield _decoding(f"{type_name}, decoded in one thread", coded)
    for state, backend in (("cached", "buffered"), ("from the drive", "auto")):
        sides: dict[str, Callable[[], float]] = {
            side: partial(_read, path, backend)
            for side, path in (("plain", plain), ("coded", coded))
        }
        for side in sides.values():
            side()
        speeds = in_turns(sides, rounds)
        yield speed_row(f"{type_name}, {state}: plain", speeds["coded"], speeds["plain"])


def model_rows(folder: Path, source: Path, alignment: int | None) -> Iterator[Row]:
    """Pack a model with the codec; say of each type how many parts got shorter, and by how much."""
    moepack.pack_model(source, folder / "pack", codec=f"zstd:{LEVEL}", alignment=alignment)
    parts: dict[str, list[PartLocation]] = defaultdict(list)
    with moepack.open(folder / "pack") as pack:
        for layer in pack.layers:
            for family in pack.families(layer):
                for kind in pack.parts(layer, family=family):
                    parts[kind.type_name] += (
                        pack.locate(layer, expert, kind.name, family=family)
                        for expert in range(pack.expert_count(layer, family=family))
                    )
    for type_name, locations in sorted(parts.items()):
        shorter = sum(location.codec is not None for location in locations)
        stored = sum(location.stored_length for location in locations)
        saved = 1 - stored / sum(location.length for location in locations)
        yield Row(f"{type_name}: shorter parts", f"{shorter} of {len(locations)}", f"{saved:.1%}")


def write_model(path: Path, chosen: Type, length: int) -> Path:
    """Write a model of one layer whose experts have about `length` bytes."""
    count = max(AT_ONCE, length // (3 * NE0 * N_FF // chosen.elements * chosen.length))
    random = np.random.Generator(np.random.SFC64(chosen.number))
    builder = models.metadata(1, count)
    for name, shape in (("gate", (NE0, N_FF)), ("up", (NE0, N_FF)), ("down", (N_FF, NE0))):
        unlike = b"".join(_expert(random, shape, chosen) for _ in range(UNLIKE))
        data = (unlike * (count // UNLIKE + 1))[: len(unlike) // UNLIKE * count]
        tensor = TensorSpec(f"blk.0.ffn_{name}_exps.weight", (*shape, count), chosen.number, data)
        builder.tensors.append(tensor)
    return builder.write(path)


def _expert(random: np.random.Generator, shape: tuple[int, int], chosen: Type) -> bytes:
    weights = (SIGMA * random.standard_normal(shape[0] * shape[1])).astype(np.float32)
    if chosen.number == TYPES["F32"].number:
        return weights.tobytes()
    quantize = llama_cpp.load().ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    target = ctypes.create_string_buffer(weights.size // chosen.elements * chosen.length)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    length = quantize(
        ctypes.c_int(chosen.number),
        pointer(weights.ctypes.data),
        target,
        size(0),
        size(shape[1]),
        size(shape[0]),
        pointer(None),
    )
    assert length == len(target)
    return target.raw


class _Packed(NamedTuple):
    """One run of packing: its seconds, and the share of the experts' bytes that is left."""

    seconds: float
    share: float


def _pack(source: Path, target: Path, codec: str | None) -> _Packed:
    shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    summary = moepack.pack_model(source, target, codec=codec)
    seconds = time.perf_counter() - began
    assert summary.stored_length is not None
    return _Packed(seconds, summary.stored_length / summary.expert_length)


def _saved(source: Path, level: int) -> float:
    """Return the share that a level saves of the experts that are unlike, however small."""
    experts = moepack.pack_model(source, source.with_suffix(".dry"), dry_run=True)
    length = experts.expert_length // experts.blob_count // 3
    with open(source, "rb") as file:
        file.seek(-experts.expert_length, 2)
        parts = [file.read(length) for _ in range(UNLIKE)]
    compress = zstandard.ZstdCompressor(level).compress
    return 1 - sum(len(compress(part)) for part in parts) / sum(map(len, parts))


def _decoding(name: str, path: Path) -> Row:
    """Measure decoding itself."""
    frames, length = [], 0
    with moepack.open(path) as pack:
        for expert in range(UNLIKE):
            for kind in pack.parts(0):
                where = pack.locate(0, expert, kind.name)
                if where.codec is not None:
                    with open(where.path, "rb") as file:
                        file.seek(where.offset)
                        frames.append(file.read(where.stored_length))
                        length += where.length
    decompress = zstandard.ZstdDecompressor().decompress
    speeds = []
    for _ in range(5):
        began = time.perf_counter()
        for frame in frames:
            decompress(frame)
        speeds.append(length / 1e9 / (time.perf_counter() - began))
    return limit_row(name, speeds, "GB/s")


def _read(path: Path, backend: str) -> float:
    """Read all experts of a pack; return the bytes a second of what was packed."""
    with moepack.open(path) as pack, pack.reader(backend=backend) as reader:
        if reader.backend != "buffered":
            page_cache.drop(pack.file_paths)
        keys = [(0, expert) for expert in range(pack.expert_count(0))]
        length = sum(kind.length for kind in pack.parts(0)) * len(keys)
        began = time.perf_counter()
        for start in range(0, len(keys), AT_ONCE):
            with reader.submit(keys[start : start + AT_ONCE]) as batch:
                for expert in batch.completions():
                    del expert
        return length / (time.perf_counter() - began)


def main() -> int:
    """Measure each type that is asked for, or a model; print each row as it is known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=__doc__)
    parser.add_argument("types", nargs="*", default=list(TYPES), help="such as F16")
    parser.add_argument("--length", type=int, default=256, help="of the experts, in MiB")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each side")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument("--model", type=Path, help="a GGUF; nothing is timed")
    parser.add_argument("--alignment", type=int, help="of its parts and blobs, in bytes")
    options = parser.parse_args()
    print(cells(HEADING))
    measures = [partial(model_rows, source=options.model, alignment=options.alignment)]
    if options.model is None:
        length = options.length << 20
        measures = [
            partial(rows, type_name=type_name, length=length, rounds=options.rounds)
            for type_name in options.types
        ]
    for measure in measures:
        with tempfile.TemporaryDirectory(prefix="moepack-bench-", dir=options.folder) as folder:
            for row in measure(Path(folder)):
                print(line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
