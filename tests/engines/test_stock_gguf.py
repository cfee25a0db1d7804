"""The exported GGUF: the model's tensors and metadata, on pages, as stock llama.cpp loads it."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gguf import GGUFReader

import moepack
from moepack.engines.stock_gguf import export_gguf
from moepack.errors import MachineError, PackError, RequestError
from moepack.packing.pack_model import pack_model
from moepack.packing.shard_index import index_model
from moepack.source.shards import open_source
from tests.support import llama_cpp, odd_models
from tests.support.gguf_builder import moe
from tests.support.machine_faults import Room
from tests.support.models import REAL_MODELS, first_shard, flip, shards_of
from tests.support.needs import needs_llama
from tests.support.packs import pieces

KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.long

TOKENS = [(37 * n + 11) % 200 + 3 for n in range(60)]
RUNNABLE = [name for name in REAL_MODELS if name != "ud-mixed"]
READABLE = [name for name in odd_models.MODELS if name != "unknown types"]


class Found(NamedTuple):
    """A tensor, as the gguf package reads it."""

    type_id: int
    shape: tuple[int, ...]
    data: bytes


def tensors_in(paths: list[str]) -> dict[str, Found]:
    """Read all tensors of some files with the gguf package, in their order."""
    return {
        tensor.name: Found(
            int(tensor.tensor_type), tuple(map(int, tensor.shape)), tensor.data.tobytes()
        )
        for path in paths
        for tensor in GGUFReader(path).tensors
    }


def metadata_in(path: str) -> dict[str, Any]:
    """Read all keys and their values with the gguf package."""
    fields = GGUFReader(path).fields.values()
    return {
        field.name: field.contents()
        for field in fields
        if not field.name.startswith(("split.", "GGUF.")) and field.name != "general.alignment"
    }


def shards_for(model: str, folder: Path) -> list[str]:
    """Return the shards of a real model or of an odd one."""
    if model in REAL_MODELS:
        return shards_of(model)
    return [str(path) for path in odd_models.write(model, folder / "source")]


def is_expert(name: str) -> bool:
    """Say whether a tensor is an expert's."""
    return "exps" in name or re.fullmatch(r"blk\.\d+\.ffn_\w+\.\d+\.weight", name) is not None


@pytest.mark.parametrize("model", [*REAL_MODELS, *READABLE])
def test_another_reader_finds_the_same_tensors_and_metadata(model: str, tmp_path: Path) -> None:
    shards = shards_for(model, tmp_path)
    pack_model(shards[0], tmp_path / "pack")
    target = tmp_path / "model.gguf"
    done = export_gguf(tmp_path / "pack", target)
    expected, found = tensors_in(shards), tensors_in([str(target)])
    assert found == expected
    assert done.tensor_count == len(expected)
    assert done.length == target.stat().st_size
    kept = metadata_in(shards[0])
    assert metadata_in(str(target)) == kept
    assert "general.architecture" in kept
    stated = GGUFReader(target).fields
    assert not [key for key in stated if key.startswith("split.")]
    assert stated["general.alignment"].contents() == done.alignment == 4 * KIB


@pytest.mark.parametrize("model", [*REAL_MODELS, *odd_models.MODELS])
def test_experts_are_last_by_layer_and_all_is_on_pages(model: str, tmp_path: Path) -> None:
    shards = shards_for(model, tmp_path)
    pack_model(shards[0], tmp_path / "pack")
    export_gguf(tmp_path / "pack", tmp_path / "model.gguf")
    tensors = open_source(tmp_path / "model.gguf").shards[0].tensors
    assert all(tensor.offset % (4 * KIB) == 0 for tensor in tensors)
    experts = [is_expert(tensor.name) for tensor in tensors]
    assert experts == sorted(experts)
    assert any(experts)
    layers = [
        int(t.name.split(".")[1]) for t, is_one in zip(tensors, experts, strict=True) if is_one
    ]
    assert layers == sorted(layers)
    dense = [
        name
        for name in (t.name for _, t in open_source(shards[0]).tensors())
        if not is_expert(name)
    ]
    assert [tensor.name for tensor in tensors][: len(dense)] == dense


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
        export_gguf(tmp_path / layout, tmp_path / f"{layout}.gguf")
        exported.add((tmp_path / f"{layout}.gguf").read_bytes())
    index_model(shards[0], tmp_path / "index")
    export_gguf(tmp_path / "index", tmp_path / "index.gguf")
    exported.add((tmp_path / "index.gguf").read_bytes())
    assert np.isfinite(expected).all()
    assert np.array_equal(llama_cpp.logits(tmp_path / "hot-first.gguf", TOKENS), expected)
    assert len(exported) == 1


@needs_llama
@pytest.mark.parametrize("alignment", [32, 4 * KIB, 16 * KIB, 64 * KIB, 2 * MIB])
def test_any_alignment_loads(alignment: int, packs: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    assert export_gguf(packs["gpt-oss"], target, alignment=alignment).alignment == alignment
    expected = llama_cpp.logits(first_shard("gpt-oss"), TOKENS)
    assert np.array_equal(llama_cpp.logits(target, TOKENS), expected)
    offsets = [tensor.offset for tensor in open_source(target).shards[0].tensors]
    assert all(offset % alignment == 0 for offset in offsets)
    assert any(offset % (2 * alignment) for offset in offsets)


@needs_llama
def test_swapped_experts_would_be_seen_in_the_logits(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "model.gguf"
    export_gguf(packs["mixtral"], target)
    tensor = next(t for t in open_source(target).shards[0].tensors if "gate_exps" in t.name)
    data = bytearray(target.read_bytes())
    length = tensor.length // tensor.dims[-1]
    first = data[tensor.offset : tensor.offset + length]
    data[tensor.offset : tensor.offset + length] = data[tensor.offset + length :][:length]
    data[tensor.offset + length : tensor.offset + 2 * length] = first
    target.write_bytes(data)
    expected = llama_cpp.logits(first_shard("mixtral"), TOKENS)
    assert not np.array_equal(llama_cpp.logits(target, TOKENS), expected)


@needs_llama
@pytest.mark.parametrize("model", ["legacy", "first without tensors", "padded", "odd names"])
def test_llama_cpp_reads_the_headers_of_odd_models(model: str, tmp_path: Path) -> None:
    shards = odd_models.write(model, tmp_path / "source")
    pack_model(shards[0], tmp_path / "pack")
    export_gguf(tmp_path / "pack", tmp_path / "model.gguf")
    assert llama_cpp.accepts_headers_isolated([tmp_path / "model.gguf"]) == [True]


def test_models_with_a_tensor_an_expert_keep_them(tmp_path: Path) -> None:
    shards = odd_models.write("legacy", tmp_path / "source")
    pack_model(shards[0], tmp_path / "pack")
    export_gguf(tmp_path / "pack", tmp_path / "model.gguf")
    names = [tensor.name for tensor in open_source(tmp_path / "model.gguf").shards[0].tensors]
    assert names[-4:] == [f"blk.1.ffn_down.{expert}.weight" for expert in range(4)]
    assert "blk.0.ffn_gate.2.weight" in names
    pack_model(tmp_path / "model.gguf", tmp_path / "again")
    with moepack.open(tmp_path / "pack") as ours, moepack.open(tmp_path / "again") as theirs:
        for layer in ours.layers:
            for expert in range(ours.expert_count(layer)):
                for part in ours.parts(layer):
                    both = [p.locate(layer, expert, part.name).digest for p in (ours, theirs)]
                    assert both[0] == both[1] is not None


@pytest.mark.parametrize("alignment", [0, 1, 16, 48, 4095, 4 * MIB, -32])
def test_what_is_no_alignment_is_refused(
    alignment: int, packs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="not an alignment"):
        export_gguf(packs["qwen3moe"], tmp_path / "model.gguf", alignment=alignment)
    assert os.listdir(tmp_path) == []


def test_a_pack_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    pack_model(first_shard("qwen3moe"), tmp_path / "pack", experts_only=True)
    with pytest.raises(PackError, match="it lacks the dense part"):
        export_gguf(tmp_path / "pack", tmp_path / "model.gguf")
    assert os.listdir(tmp_path) == ["pack"]


def test_a_flipped_bit_is_named_and_gives_no_file(tmp_path: Path) -> None:
    pack_model(first_shard("qwen3moe"), tmp_path / "pack")
    found = [(path, piece) for _, path, piece in pieces(tmp_path / "pack")]
    first_header = next(both for both in found if both[1].label == "header")
    for path, piece in (first_header, found[40], found[-1]):
        at = piece.offset + piece.length // 2
        flip(path, at)
        with pytest.raises(PackError, match="do not have the digest in the index") as raised:
            export_gguf(tmp_path / "pack", tmp_path / "model.gguf")
        assert raised.value.path == str(path)
        assert piece.label in str(raised.value.place)
        assert not (tmp_path / "model.gguf").exists()
        (tmp_path / "model.gguf.partial").unlink(missing_ok=True)
        flip(path, at)


def test_a_missing_file_is_the_packs_fault(tmp_path: Path) -> None:
    pack_model(first_shard("qwen3moe"), tmp_path / "pack")
    (tmp_path / "pack" / "dense.bin").unlink()
    with pytest.raises(PackError, match="missing"):
        export_gguf(tmp_path / "pack", tmp_path / "model.gguf")


def test_an_existing_file_is_left_alone_unless_forced(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "model.gguf"
    export_gguf(packs["qwen3moe"], target)
    whole = target.read_bytes()
    assert export_gguf(packs["qwen3moe"], target, resume=True).kept_length == len(whole)
    target.write_bytes(b"mine")
    for resume in (False, True):
        with pytest.raises(RequestError, match="exists already"):
            export_gguf(packs["qwen3moe"], target, resume=resume)
    assert target.read_bytes() == b"mine"
    export_gguf(packs["qwen3moe"], target, force=True)
    assert target.read_bytes() == whole
    (tmp_path / "folder").mkdir()
    with pytest.raises(RequestError, match="a folder has this name"):
        export_gguf(packs["qwen3moe"], tmp_path / "folder", force=True)


@pytest.mark.parametrize("name", ["dense.bin", "index.bin", "manifest.json"])
def test_a_pack_is_not_written_over_by_its_export(name: str, tmp_path: Path) -> None:
    pack_model(first_shard("qwen3moe"), tmp_path / "pack")
    with pytest.raises(RequestError, match="belongs to what is read|never written over"):
        export_gguf(tmp_path / "pack", tmp_path / "pack" / name, force=True)
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        reader.read_dense(pack.dense()[0].name)


@pytest.mark.parametrize("name", ["dense.bin", "manifest.json", "experts-00000.bin"])
@pytest.mark.parametrize("marks", ["whole", "being made", "made in place"])
def test_no_file_of_another_pack_is_written_over(
    marks: str, name: str, packs: dict[str, Path], pack_copy: Path
) -> None:
    if marks != "whole":
        (pack_copy / "in-place").mkdir()
        mark = {"being made": "pack.journal", "made in place": "in-place/journal"}[marks]
        (pack_copy / "index.bin").rename(pack_copy / mark)
    before = (pack_copy / name).read_bytes()
    for resume in (False, True):
        with pytest.raises(RequestError, match="a file of a pack is never written over"):
            export_gguf(packs["qwen3moe"], pack_copy / name, force=True, resume=resume)
    assert (pack_copy / name).read_bytes() == before


def test_a_folder_that_is_not_there_is_said(packs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such folder"):
        export_gguf(packs["qwen3moe"], tmp_path / "no" / "model.gguf")


def test_where_nothing_was_begun_nothing_is_to_be_resumed(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    with Room() as room:
        (tmp_path / "disk").mkdir()
        disk = room.mount(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "none")
        with pytest.raises(MachineError, match="Read-only file system") as raised:
            export_gguf(packs["qwen3moe"], disk / "model.gguf")
    assert raised.value.hint is None


def test_metadata_that_says_another_alignment_is_replaced(tmp_path: Path) -> None:
    builder = moe((0,)).put("general.alignment", "u32", 64)
    builder.alignment = 64
    builder.put("zeta.last", "str", "kept")
    pack_model(builder.write(tmp_path / "m.gguf"), tmp_path / "pack")
    export_gguf(tmp_path / "pack", tmp_path / "model.gguf", alignment=128)
    fields = GGUFReader(tmp_path / "model.gguf").fields
    assert fields["general.alignment"].contents() == 128
    assert fields["zeta.last"].contents() == "kept"
