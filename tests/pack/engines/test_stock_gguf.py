"""The exported GGUF: the model's tensors and metadata, on pages, as stock llama.cpp loads it."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

import moepack
from moepack.common.errors import PackError, RequestError
from moepack.packing.pack_model import pack_model
from moepack.packing.shard_index import index_model
from moepack.source.shards import open_source
from tests.support import llama_cpp, odd_models
from tests.support.gguf_builder import moe
from tests.support.models import REAL_MODELS, first_shard, shards_of
from tests.support.needs import needs_llama

KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.long

TOKENS = [(37 * n + 11) % 200 + 3 for n in range(60)]
RUNNABLE = [name for name in REAL_MODELS if name != "ud-mixed"]


def tensors_in(paths: list[str]) -> dict[str, tuple[int, list[int], bytes]]:
    """Read type, shape and bytes of all tensors of some files with the gguf package."""
    return {
        tensor.name: (int(tensor.tensor_type), tensor.shape.tolist(), tensor.data.tobytes())
        for path in paths
        for tensor in GGUFReader(path).tensors
    }


def metadata_in(path: str) -> dict[str, Any]:
    """Read all keys and their values with the gguf package, without those of the layout."""
    fields = GGUFReader(path).fields.values()
    return {
        field.name: field.contents()
        for field in fields
        if not field.name.startswith(("split.", "GGUF.")) and field.name != "general.alignment"
    }


def is_expert(name: str) -> bool:
    return "exps" in name or re.fullmatch(r"blk\.\d+\.ffn_\w+\.\d+\.weight", name) is not None


@pytest.mark.parametrize("model", [*REAL_MODELS, *odd_models.MODELS])
def test_another_reader_finds_the_same_and_experts_last(model: str, tmp_path: Path) -> None:
    """All tensors lie on pages, experts by layer behind the others, which keep their order."""
    if model in REAL_MODELS:
        shards = shards_of(model)
    else:
        shards = [str(path) for path in odd_models.write(model, tmp_path / "source")]
    pack_model(shards[0], tmp_path / "pack")
    target = tmp_path / "model.gguf"
    done = moepack.export("gguf", tmp_path / "pack", target)
    assert done.length == target.stat().st_size
    tensors = open_source(target).shards[0].tensors
    assert done.tensor_count == len(tensors)
    assert all(tensor.offset % (4 * KIB) == 0 for tensor in tensors)
    layers = [int(t.name.split(".")[1]) if is_expert(t.name) else -1 for t in tensors]
    assert layers == sorted(layers)
    assert layers[-1] >= 0
    names = [tensor.name for _, tensor in open_source(shards[0]).tensors()]
    dense = [name for name in names if not is_expert(name)]
    assert [tensor.name for tensor in tensors][: len(dense)] == dense
    if model == "unknown types":
        return
    assert tensors_in([str(target)]) == tensors_in(shards)
    metadata = metadata_in(shards[0])
    assert metadata_in(str(target)) == metadata
    assert "general.architecture" in metadata
    fields = GGUFReader(target).fields
    assert not [key for key in fields if key.startswith("split.")]
    assert fields["general.alignment"].contents() == done.alignment == 4 * KIB


@needs_llama
@pytest.mark.parametrize("model", RUNNABLE)
def test_logits_are_bit_identical_from_every_layout_and_from_an_index(
    model: str, tmp_path: Path
) -> None:
    shards = [Path(path) for path in shards_of(model)]
    expected = llama_cpp.logits(shards[0], TOKENS)
    exported = set()
    for layout in ("layers", "hot-first", "natural"):
        pack_model(shards[0], tmp_path / layout, layout=layout)
        moepack.export("gguf", tmp_path / layout, tmp_path / f"{layout}.gguf")
        exported.add((tmp_path / f"{layout}.gguf").read_bytes())
    index_model(shards[0], tmp_path / "index")
    moepack.export("gguf", tmp_path / "index", tmp_path / "index.gguf")
    exported.add((tmp_path / "index.gguf").read_bytes())
    assert np.isfinite(expected).all()
    assert np.array_equal(llama_cpp.logits(tmp_path / "hot-first.gguf", TOKENS), expected)
    assert len(exported) == 1


@needs_llama
@pytest.mark.parametrize("alignment", [32, 64 * KIB, 2 * MIB])
def test_any_alignment_loads(alignment: int, packs: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    assert (
        moepack.export("gguf", packs["gpt-oss"], target, alignment=alignment).alignment == alignment
    )
    expected = llama_cpp.logits(first_shard("gpt-oss"), TOKENS)
    assert np.array_equal(llama_cpp.logits(target, TOKENS), expected)
    offsets = [tensor.offset for tensor in open_source(target).shards[0].tensors]
    assert all(offset % alignment == 0 for offset in offsets)
    assert any(offset % (2 * alignment) for offset in offsets)


@pytest.mark.parametrize("alignment", [0, 1, 16, 48, 4095, 4 * MIB, -32])
def test_what_is_no_alignment_is_refused(
    alignment: int, packs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="not an alignment"):
        moepack.export("gguf", packs["qwen3moe"], tmp_path / "model.gguf", alignment=alignment)
    assert os.listdir(tmp_path) == []


def test_the_name_of_one_shard_of_several_is_refused(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="the name of one shard of several") as caught:
        moepack.export("gguf", packs["qwen3moe"], tmp_path / "model-00001-of-00013.gguf")
    assert caught.value.hint == "name it model.gguf"
    assert os.listdir(tmp_path) == []
    moepack.export("gguf", packs["qwen3moe"], tmp_path / "model-00001-of-00001.gguf")
    assert len(open_source(tmp_path).shards) == 1


def test_a_pack_that_lacks_something_is_refused(pack_copy: Path, tmp_path: Path) -> None:
    pack_model(first_shard("qwen3moe"), tmp_path / "experts", experts_only=True)
    with pytest.raises(PackError, match="it lacks the dense part"):
        moepack.export("gguf", tmp_path / "experts", tmp_path / "model.gguf")
    (pack_copy / "dense.bin").unlink()
    with pytest.raises(PackError, match="missing"):
        moepack.export("gguf", pack_copy, tmp_path / "model.gguf")
    (pack_copy / "dense.bin").mkdir()
    with pytest.raises(PackError, match="not a regular file"):
        moepack.export("gguf", pack_copy, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_metadata_that_says_another_alignment_is_replaced(tmp_path: Path) -> None:
    builder = moe((0,)).put("general.alignment", "u32", 64)
    builder.alignment = 64
    builder.put("zeta.last", "str", "kept")
    pack_model(builder.write(tmp_path / "m.gguf"), tmp_path / "pack")
    moepack.export("gguf", tmp_path / "pack", tmp_path / "model.gguf", alignment=128)
    fields = GGUFReader(tmp_path / "model.gguf").fields
    assert fields["general.alignment"].contents() == 128
    assert fields["zeta.last"].contents() == "kept"
