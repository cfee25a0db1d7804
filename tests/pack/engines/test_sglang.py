"""Expert packs of SGLang: the same bytes as its own tool, read by its own validator and store."""

import hashlib
import json
import struct
import subprocess
from pathlib import Path

import pytest
from gguf import GGUFReader

import moepack
from moepack.common.errors import RequestError
from moepack.pack.engines.sglang import FILE_NAME, MANIFEST_NAME
from tests.support.gguf_builder import GgufBuilder, moe
from tests.support.models import first_shard, flip
from tests.support.sglang_wheel import open_store, require_sglang, run_tool


def deepseek4(experts: int = 4, ne: tuple[int, int] = (64, 32)) -> GgufBuilder:
    """Build a model of the architecture and in the one type that SGLang reads."""
    model = {"architecture": "deepseek4", "type_id": 39, "block": (32, 17)}
    return moe((0, 1), experts, ne=ne, **model)  # type: ignore[arg-type]


@pytest.fixture
def exported(packs: dict[str, Path], tmp_path: Path) -> Path:
    """Export the MXFP4 fixture, with the GGUF."""
    moepack.export("sglang", packs["gpt-oss"], tmp_path / "sglang")
    return tmp_path / "sglang"


def test_the_head_is_as_the_format_says(exported: Path) -> None:
    data = (exported / FILE_NAME).read_bytes()
    start = b"SGLANG-EXPERTPACK-v1\0\0\0\0" + struct.pack(
        "<IIIIQQQIIII", 1, 176, 328, 3, 48, 16384, 4096, 2, 8, 2, 3
    )
    assert data[: len(start)] == start
    gguf = (exported / "gpt-oss-mxfp4-native-t8.gguf").read_bytes()
    source = hashlib.sha256(gguf).hexdigest()
    manifest = json.loads((exported / MANIFEST_NAME).read_bytes())
    config = manifest["model"]["config_sha256"]
    identity = f"sglang-deepseek-expert-pack-v1:{source}:{config}".encode()
    digests = hashlib.sha256(identity).digest() + bytes.fromhex(source) + bytes.fromhex(config)
    assert data[80:176] == digests
    first = struct.pack("<HHBBH", 0, 0, 0, 2, 39) + b"MXFP4".ljust(16, b"\0")
    assert data[176 : 176 + len(first)] == first
    assert data[200:280] == b"blk.0.ffn_gate_exps.weight".ljust(80, b"\0")
    assert len(data) == 16384 + 16 * 32768


def build_arguments(manifest: dict[str, dict[str, str]], gguf: Path) -> list[object]:
    model = manifest["model"]
    return [
        *("--source", gguf, "--source-sha256", manifest["source"]["sha256"]),
        *("--model-identity-sha256", model["model_identity_sha256"]),
        *("--config-sha256", model["config_sha256"], "--num-layers", model["num_layers"]),
        *("--num-experts", model["num_routed_experts"], "--top-k", model["top_k"]),
        *("--safety-margin-gib", 0),
    ]


def test_sglangs_own_tool_writes_the_same_bytes(exported: Path, tmp_path: Path) -> None:
    require_sglang()
    ours = json.loads((exported / MANIFEST_NAME).read_bytes())
    gguf = Path(ours["source"]["path"])
    (tmp_path / "theirs").mkdir()
    built = tmp_path / "theirs" / FILE_NAME
    run_tool("build.py", *build_arguments(ours, gguf), "--output", built)
    assert built.read_bytes() == (exported / FILE_NAME).read_bytes()
    theirs = json.loads((tmp_path / "theirs" / MANIFEST_NAME).read_bytes())
    apart = {"builder", "created_at", "pack_path", "transform", "model", "source"}
    assert ours.keys() | {"created_at", "builder"} == theirs.keys()
    assert {k: v for k, v in ours.items() if k not in apart} == {
        key: value for key, value in theirs.items() if key not in apart
    }
    assert ours["model"] | {"ref": ""} == theirs["model"] | {"ref": ""}
    assert ours["source"].items() <= theirs["source"].items()


def test_sglangs_validator_and_store_read_it(exported: Path) -> None:
    require_sglang()
    pack, manifest = exported / FILE_NAME, exported / MANIFEST_NAME
    outcome = run_tool("validate.py", "--pack", pack, "--manifest", manifest, "--full")
    assert outcome["status"] == "PASS"
    assert outcome["full_pack_entry_hash_count"] == outcome["index_count"] == 48
    assert outcome["full_source_tensor_hash_count"] == 41
    identities = json.loads(manifest.read_bytes())
    store = open_store(
        pack,
        expected_layers=2,
        expected_experts=8,
        expected_top_k=2,
        expected_source_sha256=identities["source"]["sha256"],
        expected_config_sha256=identities["model"]["config_sha256"],
        verify_pack_sha256=True,
    )
    assert len(store.entries) == 48
    store.close()


@pytest.mark.parametrize("offset", [72, 300, 20_000, 16384 + 9 * 32768 + 29_375])
def test_sglang_finds_a_flipped_bit_and_so_does_verify(
    exported: Path, packs: dict[str, Path], offset: int
) -> None:
    require_sglang()
    flip(exported / FILE_NAME, offset)
    report = moepack.verify_export("sglang", exported, pack=packs["gpt-oss"])
    assert report.passed is False
    with pytest.raises(subprocess.CalledProcessError):
        run_tool(
            "validate.py",
            *("--pack", exported / FILE_NAME, "--manifest", exported / MANIFEST_NAME, "--full"),
        )


def test_a_given_gguf_is_not_written_again(packs: dict[str, Path], tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    moepack.export("gguf", packs["gpt-oss"], gguf, alignment=64)
    done = moepack.export("sglang", packs["gpt-oss"], tmp_path / "sglang", gguf=gguf)
    assert sorted(path.name for path in (tmp_path / "sglang").iterdir()) == [
        FILE_NAME,
        MANIFEST_NAME,
    ]
    assert done.file_count == 2
    manifest = json.loads((tmp_path / "sglang" / MANIFEST_NAME).read_bytes())
    assert manifest["source"]["path"] == str(gguf)
    assert moepack.verify_export("sglang", tmp_path / "sglang", pack=packs["gpt-oss"]).passed


def test_a_pack_without_the_dense_part_needs_a_gguf(packs: dict[str, Path], tmp_path: Path) -> None:
    moepack.export("gguf", packs["gpt-oss"], tmp_path / "model.gguf")
    moepack.pack_model(first_shard("gpt-oss"), tmp_path / "experts", experts_only=True)
    with pytest.raises(RequestError, match="no dense part") as caught:
        moepack.export("sglang", tmp_path / "experts", tmp_path / "out")
    assert caught.value.hint == "name one with `gguf`"
    gguf = tmp_path / "model.gguf"
    moepack.export("sglang", tmp_path / "experts", tmp_path / "out", gguf=gguf)
    assert moepack.verify_export("sglang", tmp_path / "out", source=first_shard("gpt-oss")).passed


def test_the_gguf_of_another_model_or_with_other_bytes_is_refused(
    packs: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "sglang"
    moepack.export("gguf", packs["mixtral"], tmp_path / "other.gguf")
    with pytest.raises(RequestError, match="not a GGUF of this model"):
        moepack.export("sglang", packs["gpt-oss"], target, gguf=tmp_path / "other.gguf")
    with pytest.raises(RequestError, match="a split GGUF"):
        moepack.export("sglang", packs["gpt-oss"], target, gguf=first_shard("gpt-oss"))
    moepack.export("gguf", packs["gpt-oss"], tmp_path / "damaged.gguf")
    tensors = {one.name: one for one in GGUFReader(tmp_path / "damaged.gguf").tensors}
    flip(tmp_path / "damaged.gguf", int(tensors["blk.1.ffn_down_exps.weight"].data_offset) + 9)
    with pytest.raises(RequestError, match="other bytes than the pack"):
        moepack.export("sglang", packs["gpt-oss"], target, gguf=tmp_path / "damaged.gguf")
    assert not list(target.iterdir())


def test_an_export_that_was_moved_is_found_by_the_paths_in_its_manifest(
    exported: Path, packs: dict[str, Path]
) -> None:
    moved = exported.rename(exported.with_name("moved"))
    (finding,) = moepack.verify_export("sglang", moved, pack=packs["gpt-oss"]).findings
    assert (finding.kind, finding.file) == ("manifest", MANIFEST_NAME)
    assert f'expected "pack_path": "{moved}' in finding.message


def test_a_config_is_entered(packs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    moepack.export("sglang", packs["gpt-oss"], tmp_path / "out", config=tmp_path / "config.json")
    manifest = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())
    assert manifest["model"]["config_sha256"] == hashlib.sha256(b"{}").hexdigest()


def test_layers_that_differ_are_all_named(tmp_path: Path) -> None:
    builder = deepseek4()
    for tensor in builder.tensors:
        if tensor.name == "blk.1.ffn_down_exps.weight":
            tensor.dims, tensor.data = (64, 64, 4), tensor.data * 2
    moepack.pack_model(builder.write(tmp_path / "m.gguf"), tmp_path / "pack")
    with pytest.raises(RequestError, match="of the same length in all layers"):
        moepack.export("sglang", tmp_path / "pack", tmp_path / "out")


def test_a_pack_of_some_layers_is_refused_with_the_command_to_make_another(
    tmp_path: Path,
) -> None:
    source = deepseek4().write(tmp_path / "m.gguf")
    moepack.pack_model(source, tmp_path / "pack", layers="0")
    with pytest.raises(RequestError, match="needs all layers: the pack has 0") as caught:
        moepack.export("sglang", tmp_path / "pack", tmp_path / "out")
    assert caught.value.hint == "moepack pack m.gguf -o new.moepack"


def test_notes_say_what_sglang_cannot_do_with_it(packs: dict[str, Path], tmp_path: Path) -> None:
    notes = moepack.export("sglang", packs["gpt-oss"], tmp_path / "a", dry_run=True).notes
    assert len(notes) == 2
    whole_pages = deepseek4(2, ne=(1024, 1024))
    moepack.pack_model(whole_pages.write(tmp_path / "m.gguf"), tmp_path / "pack")
    assert moepack.export("sglang", tmp_path / "pack", tmp_path / "b").notes == ()
