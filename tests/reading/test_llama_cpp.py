"""A real llama.cpp agrees: a model fed from a pack, expert by expert, gives the same logits."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

import moepack
from moepack.reading.pack import Pack
from moepack.reading.reader import Reader
from tests.support import llama_cpp
from tests.support.models import REAL_MODELS, pack_model, shards_of
from tests.support.needs import needs_llama

pytestmark = [
    pytest.mark.long,
    needs_llama,
]

# Enough tokens that each expert of these small models is chosen by one of them at least.
TOKENS = [(37 * n + 11) % 200 + 3 for n in range(200)]


def tensors_of(model: str) -> dict[str, bytes]:
    """Read all tensors of a model with the gguf package."""
    readers = [GGUFReader(path) for path in shards_of(model)]
    return {tensor.name: tensor.data.tobytes() for r in readers for tensor in r.tensors}


def feed(
    pack: Pack, reader: Reader, dense: dict[str, bytes], order: Callable[[int], int]
) -> llama_cpp.TensorSource:
    """Fill expert tensors from the pack, one expert at a time, and the others from the GGUF."""
    parts = {f"blk.{layer}.{kind.name}": (layer, kind) for layer in pack.layers
             for kind in pack.parts(layer)}  # fmt: skip

    def source(name: str, view: memoryview) -> None:
        if name not in parts:
            view[:] = dense[name]
            return
        layer, kind = parts[name]
        for expert in range(pack.expert_count(layer)):
            place = view[expert * kind.length : (expert + 1) * kind.length]
            reader.read_into(place, layer, order(expert), kind.name)

    return source


@pytest.mark.parametrize("layout_name", ["layers", "hot-first"])
@pytest.mark.parametrize("model", [name for name in REAL_MODELS if name != "ud-mixed"])
def test_logits_from_the_pack_are_bit_identical(
    model: str, layout_name: str, tmp_path: Path
) -> None:
    counts = {(layer, expert): (expert * 5) % 7 for layer in (2, 3) for expert in range(16)}
    heat = counts if model == "deepseek2" else None
    pack_model([Path(shards_of(model)[0])], tmp_path / "pack", layout_name, counts=heat)
    paths = [Path(path) for path in shards_of(model)]
    expected = llama_cpp.logits(paths[0], TOKENS)
    held = tensors_of(model)
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        names = {f"blk.{layer}.{kind.name}" for layer in pack.layers for kind in pack.parts(layer)}
        dense = {name: data for name, data in held.items() if name not in names}
        found = llama_cpp.logits_from(paths, TOKENS, feed(pack, reader, dense, lambda e: e))
        swapped = feed(pack, reader, dense, lambda e: {0: 1, 1: 0}.get(e, e))
        other = llama_cpp.logits_from(paths, TOKENS, swapped)
    assert np.array_equal(found, expected)
    assert not np.array_equal(other, expected)
