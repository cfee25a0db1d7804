"""The bytes of each format, written down from its description, and what each engine needs."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

import moepack
from moepack.common.errors import RequestError
from tests.support.gguf_builder import GgufBuilder, moe
from tests.support.models import contents, flip, hotness_of, pack_model
from tests.support.sglang_wheel import ggml_moe_pack_tool, require_sglang

SIZE = 2176
"""The bytes of one part of an expert of the tiny model: 32 rows of 68, or 64 of 34."""

ROLES = ("gate", "up", "down")


@pytest.fixture
def builder() -> GgufBuilder:
    """Build a model with two experts in the second and the third of three layers."""
    return moe((1, 2), 2, architecture="deepseek4")


@pytest.fixture
def source(builder: GgufBuilder, tmp_path: Path) -> Path:
    """Write it."""
    return builder.write(tmp_path / "m.gguf")


@pytest.fixture
def pack(source: Path, tmp_path: Path) -> Path:
    """Pack it, with an expert that is hotter than the others."""
    hotness = hotness_of({(2, 1): 9, (1, 0): 4})
    moepack.pack_model(source, tmp_path / "pack", layout="natural", hotness=hotness)
    return tmp_path / "pack"


def part(builder: GgufBuilder, layer: int, role: str, expert: int) -> bytes:
    """Return the bytes of a part, as the builder made them."""
    name = f"blk.{layer}.ffn_{role}_exps.weight"
    data = next(tensor.data for tensor in builder.tensors if tensor.name == name)
    return data[expert * SIZE : (expert + 1) * SIZE]


def paged(data: bytes, page: int = 4096) -> bytes:
    return data + bytes(-len(data) % page)


def test_moe_stream_dir(builder: GgufBuilder, pack: Path, tmp_path: Path) -> None:
    done = moepack.export("moe-stream-dir", pack, tmp_path / "out")
    assert contents(tmp_path / "out") == {
        f"layer_{layer:02d}.{role}.bin": part(builder, layer, role, 0)
        + part(builder, layer, role, 1)
        for layer in (1, 2)
        for role in ROLES
    }
    assert done.command == f"llama-server -m MODEL.gguf --moe-stream-dir {tmp_path / 'out'}"


@pytest.mark.parametrize(
    ("order", "experts"),
    [
        ("auto", [(2, 1), (1, 0), (1, 1), (2, 0)]),
        ("hotness", [(2, 1), (1, 0), (1, 1), (2, 0)]),
        ("source", [(1, 0), (1, 1), (2, 0), (2, 1)]),
    ],
)
def test_ggmlmoepack(
    order: str, experts: list[tuple[int, int]], builder: GgufBuilder, pack: Path, tmp_path: Path
) -> None:
    moepack.export("ggmlmoepack", pack, tmp_path / "out", order=order)
    index, data, start = b"", b"", 4096
    for layer, expert in experts:
        for role in ("up", "gate", "down"):
            data = paged(data)
            name = f"blk.{layer}.ffn_{role}_exps.weight".encode().ljust(128, b"\0")
            index += name + struct.pack("<iIQQ", expert, 0, start + len(data), SIZE)
            data += part(builder, layer, role, expert)
    header = b"GGMLMOEPACKv1\0\0\0" + struct.pack("<IIQQ", 1, 40, 12, start)
    assert (tmp_path / "out").read_bytes() == paged(header + index) + data


@pytest.mark.parametrize("alignment", [4096, 2 << 20])
def test_moe_flash(builder: GgufBuilder, pack: Path, tmp_path: Path, alignment: int) -> None:
    options = {} if alignment == 2 << 20 else {"alignment": alignment}
    moepack.export("moe-flash", pack, tmp_path / "out", **options)  # type: ignore[arg-type]
    written = contents(tmp_path / "out")
    manifest = written.pop("manifest.json").decode()
    assert written == {
        f"L{layer:03d}_E{expert:04d}.bin": paged(
            b"".join(part(builder, layer, role, expert) for role in ROLES), alignment
        )
        for layer in (1, 2)
        for expert in (0, 1)
    }
    padded = -(-3 * SIZE // alignment) * alignment
    layers: list[dict[str, Any]] = [
        {
            "layer": layer,
            "n_experts": 2,
            "experts": [
                {
                    "id": expert,
                    "file": f"L{layer:03d}_E{expert:04d}.bin",
                    "parts": [
                        {
                            "name": role,
                            "offset": number * SIZE,
                            "size": SIZE,
                            "type": "Q8_0",
                            "dims": [32, 64] if role == "down" else [64, 32],
                        }
                        for number, role in enumerate(ROLES)
                    ],
                    "padded_size": padded,
                    "raw_size": 3 * SIZE,
                }
                for expert in (0, 1)
            ],
        }
        for layer in (1, 2)
    ]
    expected = {
        "version": 1,
        "source_gguf": "m.gguf",
        "alignment": alignment,
        "n_layers": 2,
        "n_experts": 2,
        "layers": layers,
        "total_bytes": 4 * padded,
    }
    assert manifest == json.dumps(expected, indent=2)


def test_anemll(source: Path, pack: Path) -> None:
    done = moepack.export("anemll", pack)
    assert done.path == str(pack / "anemll.json")
    assert (done.is_copied, done.length) == (False, (pack / "anemll.json").stat().st_size)
    manifest = json.loads((pack / "anemll.json").read_bytes())
    offsets = {one.name: int(one.data_offset) for one in GGUFReader(source).tensors}
    entries = manifest.pop("entries")
    assert manifest == {
        "schema_version": 1,
        "sidecar_kind": "flashmoe_gguf",
        "layout": "layer_major_expert",
        "source": {"model_files": ["m.gguf"]},
        "model": {
            "arch": "deepseek4",
            "expert_count": 2,
            "expert_used_count": 2,
            "leading_dense_block_count": 1,
        },
    }
    assert entries == [
        {
            "layer": layer,
            "tensor_family": f"ffn_{role}_exps",
            "tensor_name": f"blk.{layer}.ffn_{role}_exps.weight",
            "quant_type": "Q8_0",
            "shape": [32, 64, 2] if role == "down" else [64, 32, 2],
            "source_shard": "m.gguf",
            "source_shard_index": 0,
            "source_offset": offsets[f"blk.{layer}.ffn_{role}_exps.weight"],
            "exact_byte_length": 2 * SIZE,
            "bytes_per_expert": SIZE,
            "expert_count": 2,
            "expert_major": True,
            "expert_stride": 12288,
            "repacked_file": f"experts-{layer:05d}.bin",
            "repacked_offset": number * 4096,
        }
        for layer in (1, 2)
        for number, role in enumerate(ROLES)
    ]


def test_a_manifest_in_the_pack_leaves_it_sound_and_can_be_written_again(pack: Path) -> None:
    moepack.export("anemll", pack)
    assert moepack.verify(pack).passed
    with pytest.raises(RequestError, match="exists already"):
        moepack.export("anemll", pack)
    (pack / "anemll.json").write_text("{}")
    moepack.export("anemll", pack, force=True)
    assert not moepack.verify_export("anemll", pack / "anemll.json", pack=pack).findings
    for name in ("manifest.json", "index.bin", "experts-00001.bin"):
        before = (pack / name).read_bytes()
        with pytest.raises(RequestError, match="never overwritten|one of the files to read"):
            moepack.export("anemll", pack, pack / name, force=True)
        assert (pack / name).read_bytes() == before


def test_a_manifest_elsewhere_finds_the_pack(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    moepack.export("anemll", pack, tmp_path / "other" / "sidecar.json")
    manifest = json.loads((tmp_path / "other" / "sidecar.json").read_bytes())
    assert manifest["entries"][0]["repacked_file"] == "../pack/experts-00001.bin"
    report = moepack.verify_export("anemll", tmp_path / "other" / "sidecar.json", pack=pack)
    assert not report.findings


def test_a_changed_manifest_is_found_by_its_line(pack: Path) -> None:
    path = pack / "anemll.json"
    moepack.export("anemll", pack)
    text = path.read_text()
    path.write_text(text.replace('"expert_stride": 12288', '"expert_stride": 100', 1))
    (finding,) = moepack.verify_export("anemll", path, pack=pack).findings
    offset = text.index('"expert_stride": 12288') + len('"expert_stride": 1')
    line = text.count("\n", 0, offset) + 1
    assert finding.message == (
        f'line {line}: expected "expert_stride": 12288,, found "expert_stride": 100,'
    )
    assert (finding.kind, finding.file, finding.offset) == ("manifest", "anemll.json", offset)


def test_a_changed_header_of_a_gguf_is_found_by_its_offset(pack: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported.gguf"
    moepack.export("gguf", pack, target)
    flip(target, offset := target.read_bytes().index(b"Built for"))
    (finding,) = moepack.verify_export("gguf", target, pack=pack).findings
    assert (finding.kind, finding.file, finding.offset) == ("record", "exported.gguf", offset)


def test_damage_that_was_copied_from_the_pack_is_found_by_the_digest(
    pack: Path, tmp_path: Path
) -> None:
    """As where an export shares its blocks with the pack, and nobody read them."""
    moepack.export("moe-stream-dir", pack, tmp_path / "out")
    flip(tmp_path / "out" / "layer_02.up.bin", SIZE + 5)
    with moepack.open(pack) as opened:
        location = opened.locate(2, 1, "up")
    flip(location.path, location.offset + 5)
    (finding,) = moepack.verify_export("moe-stream-dir", tmp_path / "out", pack=pack).findings
    assert finding.kind == "digest"
    assert (finding.layer, finding.expert, finding.part) == (2, 1, "ffn_up_exps.weight")
    assert (finding.file, finding.offset) == ("layer_02.up.bin", SIZE)


def test_an_index_over_shards_cannot_be_read_in_place(source: Path, tmp_path: Path) -> None:
    moepack.index_model(source, tmp_path / "index")
    with pytest.raises(RequestError, match="at equal distances: layers 1-2"):
        moepack.export("anemll", tmp_path / "index", tmp_path / "out.json")
    for engine in ("moe-stream-dir", "ggmlmoepack"):
        moepack.export(engine, tmp_path / "index", tmp_path / engine)
        assert moepack.verify_export(engine, tmp_path / engine, source=source).passed


@pytest.mark.parametrize("engine", ["ggmlmoepack", "moe-stream-dir", "moe-flash", "anemll"])
def test_a_tensor_for_each_expert_is_refused(engine: str, tmp_path: Path) -> None:
    from tests.support import odd_models

    shards = odd_models.write("legacy", tmp_path / "source")
    moepack.pack_model(shards[0], tmp_path / "pack", layout="natural")
    with pytest.raises(RequestError, match="the GGUF has a tensor for each"):
        moepack.export(engine, tmp_path / "pack", tmp_path / "out")


def test_moe_flash_says_what_its_engine_leaves_out(tmp_path: Path) -> None:
    builder = moe((0,), 260).put("qwen3moe.expert_used_count", "u32", 17)
    moepack.pack_model(builder.write(tmp_path / "m.gguf"), tmp_path / "pack")
    done = moepack.export("moe-flash", tmp_path / "pack", tmp_path / "out", dry_run=True)
    assert done.notes == (
        "the engine does not prefetch experts from 256 on: there are 260",
        "the engine prefetches 16 experts of a token: the model uses 17",
    )
    assert done.file_count == 261
    with pytest.raises(RequestError, match="not an alignment"):
        moepack.export("moe-flash", tmp_path / "pack", tmp_path / "out", alignment=3000)


def test_kimi_k3_is_written_in_the_order_that_sglang_needs(tmp_path: Path) -> None:
    """Its own writer makes the same file of the same model, and its own validator passes it."""
    require_sglang()
    builder = moe((1, 2), 4, architecture="kimi-k3", ne=(64, 64))
    source = builder.write(tmp_path / "m.gguf")
    pack_model([source], tmp_path / "pack", counts={(2, 1): 9})
    done = moepack.export("ggmlmoepack", tmp_path / "pack", tmp_path / "ours")
    assert done.notes == ()
    tool = ggml_moe_pack_tool()
    tensors = {}
    for tensor in GGUFReader(source).tensors:
        if "_exps.weight" in tensor.name:
            _, layer, name, _ = tensor.name.split(".")
            record = tool.TensorRecord(
                name=tensor.name,
                shape=tuple(int(axis) for axis in tensor.shape),
                dtype=tensor.tensor_type.name,
                dtype_id=int(tensor.tensor_type),
                shard_index=0,
                shard_path=str(source),
                data_offset=int(tensor.data_offset),
                nbytes=int(tensor.n_bytes),
            )
            tensors[int(layer), name.split("_")[1]] = record
    spec = tool.KimiK3Spec(3, 1, 4, 2, 1, 64, 64, 64, "situ", (1, 2))
    tool.write_ggml_moe_pack(tmp_path / "theirs", tensors, spec)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    outcome = tool.validate_ggml_moe_pack(tmp_path / "ours", tensors, spec, payload_samples=24)
    assert outcome["payload_samples_verified"] == 24
    hot = moepack.export("ggmlmoepack", tmp_path / "pack", tmp_path / "hot", order="hotness")
    assert hot.notes == ("SGLang needs the order of the source; L-Ark's llama.cpp takes any",)
    with pytest.raises(ValueError, match="not complete expert-major"):
        tool.validate_ggml_moe_pack(tmp_path / "hot", tensors, spec)
