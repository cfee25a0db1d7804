"""Packs of the GGUFs behind other engines' files, and what is found in these."""

import json
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import RequestError
from moepack.pack.engines.sglang import FILE_NAME
from tests.support.models import contents, first_shard, flip, tree

STREAM = "moe-stream-dir"


@pytest.fixture
def stream(packs: dict[str, Path], tmp_path: Path) -> Path:
    """Export the experts of a model to the folder of an engine."""
    moepack.export(STREAM, packs["mixtral"], tmp_path / "experts")
    return tmp_path / "experts"


def whole_tensors(folder: Path, pack: Path, source: Path) -> None:
    """Write a folder as Anemll's own tool does: tensor after tensor, without strides or counts."""
    folder.mkdir()
    entries: list[dict[str, Any]] = []
    with moepack.open(pack) as opened, opened.reader() as reader:
        for layer in opened.layers:
            name, offset = f"layer_{layer:03}.bin", 0
            with open(folder / name, "wb") as file:
                for kind in opened.parts(layer):
                    experts = range(opened.expert_count(layer))
                    tensor = b"".join(reader.read(layer, expert, kind.name) for expert in experts)
                    file.write(tensor)
                    entries.append(
                        {
                            "layer": layer,
                            "tensor_family": kind.name.removesuffix(".weight"),
                            "tensor_name": f"blk.{layer}.{kind.name}",
                            "quant_type": kind.type_name,
                            "exact_byte_length": len(tensor),
                            "bytes_per_expert": kind.length,
                            "repacked_file": name,
                            "repacked_offset": offset,
                        }
                    )
                    offset += len(tensor)
    manifest = {
        "schema_version": 1,
        "sidecar_kind": "flashmoe_gguf",
        "layout": "layer_major_whole_tensor",
        "source": {"model_files": [str(source)]},
        "entries": [*entries, {"tensor_family": "ffn_gate_shexp", "layer": 0}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_the_pack_is_that_of_the_gguf_and_every_expert_is_compared(
    stream: Path, tmp_path: Path
) -> None:
    source = first_shard("mixtral")
    done = moepack.import_pack(STREAM, stream, source, tmp_path / "pack", layout="natural")
    moepack.pack_model(source, tmp_path / "expected", layout="natural")
    assert contents(tmp_path / "pack") == contents(tmp_path / "expected")
    assert (done.engine, done.path, done.source) == (STREAM, str(stream), (str(source),))
    assert done.report.passed
    assert done.report.compared_length == sum(path.stat().st_size for path in stream.iterdir())
    assert done.pack.layout == "natural"


def test_a_flipped_byte_and_a_missing_file_are_found_and_the_pack_stays(
    stream: Path, tmp_path: Path
) -> None:
    flip(stream / "layer_01.down.bin", 77)
    (stream / "layer_00.up.bin").unlink()
    source = first_shard("mixtral")
    report = moepack.import_pack(STREAM, stream, source, tmp_path / "pack").report
    assert report.passed is False
    *missing, flipped = report.findings
    places = [(one.kind, one.layer, one.expert, one.part) for one in missing]
    assert places == [("missing", 0, expert, "ffn_up_exps.weight") for expert in range(8)]
    assert (flipped.kind, flipped.offset) == ("bytes", 77)
    assert (flipped.layer, flipped.expert, flipped.part) == (1, 0, "ffn_down_exps.weight")
    assert moepack.verify(tmp_path / "pack", source).passed


def test_another_models_gguf_is_refused_before_anything_is_written(
    stream: Path, tmp_path: Path
) -> None:
    before = tree(tmp_path)
    with pytest.raises(RequestError, match="nothing in it is of this model") as caught:
        moepack.import_pack(STREAM, stream, first_shard("gpt-oss"), tmp_path / "pack")
    assert caught.value.found == str(first_shard("gpt-oss"))
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("engine", "name", "source", "message"),
    [
        (STREAM, "none", None, "none: no such file or folder"),
        (STREAM, "experts", None, "experts: no GGUF that is here is named in it"),
        ("sglang", "experts", None, "experts: no GGUF that is here is named in it"),
        ("sglang", "experts", first_shard("mixtral"), "cannot read: No such file or directory"),
        ("vllm", "experts", None, "no such format"),
    ],
)
def test_what_cannot_be_imported_is_refused_before_anything_is_written(
    engine: str, name: str, source: Path | None, message: str, stream: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        moepack.import_pack(engine, stream.with_name(name), source, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("name", [".", FILE_NAME])
def test_the_gguf_is_the_one_that_sglangs_manifest_names(
    name: str, packs: dict[str, Path], tmp_path: Path
) -> None:
    moepack.export("sglang", packs["gpt-oss"], tmp_path / "sglang")
    gguf = tmp_path / "sglang" / "gpt-oss-mxfp4-native-t8.gguf"
    path = tmp_path / "sglang" / name
    done = moepack.import_pack("sglang", path, None, tmp_path / "pack")
    assert (done.source, done.report.passed) == ((str(gguf),), True)
    gguf.unlink()
    with pytest.raises(RequestError, match="no GGUF that is here is named in it"):
        moepack.import_pack("sglang", path, None, tmp_path / "again")


def test_a_folder_of_anemlls_own_tool_is_read(packs: dict[str, Path], tmp_path: Path) -> None:
    folder, source = tmp_path / "sidecar", first_shard("mixtral")
    whole_tensors(folder, packs["mixtral"], source)
    done = moepack.import_pack("anemll", folder, None, tmp_path / "pack")
    assert (done.source, done.report.findings) == ((str(source),), ())
    assert done.report.part_count == 2 * 8 * 3
    flip(folder / "layer_001.bin", 0)
    (finding,) = moepack.verify_export("anemll", folder, pack=tmp_path / "pack").findings
    assert (finding.layer, finding.expert, finding.offset) == (1, 0, 0)


def test_a_folder_of_anemlls_may_be_a_pack(tmp_path: Path) -> None:
    source = first_shard("mixtral")
    moepack.pack_model(source, tmp_path / "one", layout="natural")
    moepack.export("anemll", tmp_path / "one")
    assert moepack.import_pack("anemll", tmp_path / "one", source, tmp_path / "two").report.passed


def test_an_interrupted_import_goes_on(stream: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    source, target = first_shard("mixtral"), tmp_path / "pack"
    with pytest.raises(KeyboardInterrupt):
        moepack.import_pack(STREAM, stream, source, target, progress=stop)
    counts: list[tuple[int, int]] = []

    def count(done: int, total: int) -> None:
        counts.append((done, total))

    done = moepack.import_pack(STREAM, stream, source, target, resume=True, progress=count)
    assert done.report.passed
    assert sum(length for length, _ in counts) == counts[-1][1]
