"""What all tests share: the real models, and ways to run moepack."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack import experts, layout, packer, plan
from moepack.pack import BlobLocation, Pack, PartLocation
from moepack.source import Source, open_source
from tests.faulty_backend import NAMES, require

FIXTURES = Path(__file__).parent.parent / "fixtures"

REAL_MODELS = {
    "qwen3moe": "qwen3moe-Q4_K_M-ntfs-t6-00001-of-00006.gguf",
    "ud-mixed": "qwen3moe-ud-mixed-t5-00001-of-00006.gguf",
    "deepseek2": "deepseek2-v3-IQ4_XS-ntfs-t13-00001-of-00006.gguf",
    "gpt-oss": "gpt-oss-mxfp4-native-t8-00001-of-00006.gguf",
    "granite": "granite-swa-Q4_K_M-t7-00001-of-00004.gguf",
    "mixtral": "mixtral-Q4_K_M-t7-00001-of-00004.gguf",
}


def first_shard(model: str) -> Path:
    """Give the first shard of a real model in fixtures/."""
    return FIXTURES / REAL_MODELS[model]


def shards_of(model: str) -> list[str]:
    """Give the paths of all shards of a real model, in order."""
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
    """Pack the model at `paths` into `target`; give the source."""
    source = open_source(paths)
    counts = options.pop("counts", None)
    layers = options.get("layers")
    found = experts.find(source)
    planned = plan.make(found, layout.load(layout_name), counts=counts, layers=layers)
    packer.pack(source, planned, target, **options)
    return source


@pytest.fixture
def moepack_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the `moepack` command as its users do, in a process of its own."""

    def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moepack", *map(str, arguments)]
        options = {"capture_output": True, "text": True, "timeout": 120} | options
        return subprocess.run(command, check=False, **options)

    return run


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pack each real model once, read-only for all tests."""
    folder = tmp_path_factory.mktemp("packs")
    for model in REAL_MODELS:
        pack_model([first_shard(model)], folder / model)
    return {model: folder / model for model in REAL_MODELS}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, packs: dict[str, Path]) -> str:
    """Name each backend that works here."""
    return require(request.param, packs["qwen3moe"])


@pytest.fixture
def pack(packs: dict[str, Path]) -> Iterator[Pack]:
    """Open the pack of qwen3moe."""
    with moepack.open(packs["qwen3moe"]) as opened:
        yield opened


def keys_of(pack: Pack) -> list[tuple[int, int]]:
    """List (layer, expert) of all blobs of a pack's main families."""
    return [(layer, n) for layer in pack.layers for n in range(pack.expert_count(layer))]


def on_disk(where: BlobLocation | PartLocation) -> bytes:
    """Read a blob or a part plainly."""
    with open(where.path, "rb") as file:
        file.seek(where.offset)
        return file.read(where.length)


@pytest.fixture
def pack_copy(packs: dict[str, Path], tmp_path: Path) -> Path:
    """Copy the pack of qwen3moe, for a test that damages it."""
    return Path(shutil.copytree(packs["qwen3moe"], tmp_path / "pack"))


def flip(path: Path, offset: int, mask: int = 0x01) -> None:
    """Change one byte of a file by XOR, and make sure that something changed."""
    data = bytearray(path.read_bytes())
    before = data[offset]
    data[offset] ^= mask
    assert data[offset] != before
    path.write_bytes(data)
