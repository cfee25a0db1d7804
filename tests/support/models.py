"""The real models in fixtures/, packs of them, and damage to their files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moepack.common.shape import ExpertKey
from moepack.pack.reading.expert_read import FileRead
from moepack.pack.reading.locations import BlobLocation, PartLocation
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.reader import Reader
from moepack.packing import pack_model as packing
from moepack.source.shards import Source, open_source
from moepack.traces.hotness.model import Hotness

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"

REAL_MODELS = {
    "qwen3moe": "qwen3moe-Q4_K_M-ntfs-t6-00001-of-00006.gguf",
    "ud-mixed": "qwen3moe-ud-mixed-t5-00001-of-00006.gguf",
    "deepseek2": "deepseek2-v3-IQ4_XS-ntfs-t13-00001-of-00006.gguf",
    "gpt-oss": "gpt-oss-mxfp4-native-t8-00001-of-00006.gguf",
    "granite": "granite-swa-Q4_K_M-t7-00001-of-00004.gguf",
    "mixtral": "mixtral-Q4_K_M-t7-00001-of-00004.gguf",
}

I_QUANTS = {"ud-mixed", "deepseek2"}
"""Models with experts of types that llama.cpp computes only where a GGUF has them."""


def first_shard(model: str) -> Path:
    return FIXTURES / REAL_MODELS[model]


def shards_of(model: str) -> list[str]:
    """Return the paths of all shards of a real model, in order."""
    return [shard.path for shard in open_source([first_shard(model)]).shards]


def oracle() -> dict[str, dict[str, Any]]:
    """Map each model to its expert tensors, as llama.cpp's gguf-py saw the unsplit file."""
    entries = [json.loads(line) for line in (FIXTURES / "ORACLE.jsonl").read_text().splitlines()]
    by_name = {Path(entry["file"]).stem: entry["tensors"] for entry in entries}
    prefixes = {model: REAL_MODELS[model].rpartition("-of-")[0] for model in REAL_MODELS}
    return {
        model: next(tensors for name, tensors in by_name.items() if prefix.startswith(name))
        for model, prefix in prefixes.items()
    }


def pack_model(
    paths: list[Path], target: Path, layout_name: str = "layers", **options: Any
) -> Source:
    counts = options.pop("counts", None)
    if counts is not None:
        options["hotness"] = hotness_of(counts)
    packing.pack_model(paths, target, layout=layout_name, **options)
    return open_source(paths)


def hotness_of(counts: Mapping[tuple[int, int], int]) -> Hotness:
    """Return hotness that was counted by hand."""
    by_expert = {ExpertKey(*key): count for key, count in counts.items()}
    return Hotness(path="counts", counts=by_expert, token_count=None, digest=0)


def keys_of(pack: Pack) -> list[tuple[int, int]]:
    """List (layer, expert) of all blobs of a pack's main families."""
    return [(layer, n) for layer in pack.layers for n in range(pack.expert_count(layer))]


def on_disk(where: BlobLocation | PartLocation | FileRead) -> bytes:
    with open(where.path, "rb") as file:
        file.seek(where.offset)
        return file.read(where.length)


def reads_right(
    pack: Pack,
    reader: Reader,
    *without: tuple[int, int],
    rounds: int = 1,
    errors: int | None = None,
) -> None:
    """Read all other experts one by one and together, and look at the statistics."""
    keys = [key for key in keys_of(pack) if key not in without]
    for _ in range(rounds):
        for key in keys[::3]:
            assert reader.read(*key) == on_disk(pack.locate(*key))
        for in_order in (True, False):
            for one in reader.read_many(keys, in_order=in_order):
                assert one.view == on_disk(pack.locate(*keys[one.number]))
    now = reader.statistics
    assert (now.in_flight_count, now.in_flight_length) == (0, 0)
    if errors is not None:
        assert now.error_count == errors


def flip(path: Path, offset: int, mask: int = 0x01) -> None:
    """Change one byte of a file by XOR, and make sure that something changed."""
    data = bytearray(path.read_bytes())
    before = data[offset]
    data[offset] ^= mask
    assert data[offset] != before
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tree(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder, by their path in it."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def digest_of_all(folder: Path) -> str:
    """Return the SHA-256 of the names and the SHA-256s of all files below a folder."""
    lines = (
        f"{name} {hashlib.sha256(data).hexdigest()}\n"
        for name, data in sorted(tree(folder).items())
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()
