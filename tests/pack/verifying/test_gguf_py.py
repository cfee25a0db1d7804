"""gguf-py's opinion: it reads the same as moepack, and differences are found."""

import random
import shutil
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import RequestError, SourceError
from moepack.pack.verifying.report import Report
from moepack.pack.verifying.verifier import verify
from moepack.report import verification_text
from tests.support import odd_models
from tests.support.children import run_child
from tests.support.gguf_builder import moe, split, write_shards
from tests.support.models import first_shard, flip, pack_model
from tests.support.pack_draft import Draft

Q8_1 = 9


def asked(pack: Path, source: Path | list[Path], **options: object) -> Report:
    paths = [str(path) for path in source] if isinstance(source, list) else str(source)
    return verify(pack, paths, with_gguf_py=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", odd_models.MODELS)
def test_gguf_py_reads_the_same_in_odd_models_as_far_as_it_knows_their_types(
    name: str, tmp_path: Path
) -> None:
    paths = odd_models.write(name, tmp_path / "model")
    pack_model(paths, tmp_path / "pack")
    report = asked(tmp_path / "pack", paths)
    assert report.findings == ()
    if name == "unknown types":
        assert report.passed is None
        assert report.gguf_py_length == 0
        (words,) = report.not_looked_at
        assert words.endswith("reads in model.gguf: it does not know GGML's types 199")
    else:
        with moepack.open(tmp_path / "pack") as pack:
            tensor_length = pack.shape.expert_length + (pack.shape.dense_length or 0)
        assert (report.passed, report.gguf_py_length) == (True, tensor_length)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build two layers of eight experts in `model` and pack them beside into `pack`."""
    folder = tmp_path_factory.mktemp("gguf-py")
    paths = write_shards(split(moe((0, 1), 8), 5), folder / "model")
    pack_model(paths, folder / "pack")
    return folder


@pytest.mark.parametrize("seed", range(3))
def test_a_byte_of_the_source_that_differs_is_found_by_both_at_the_same_place(
    seed: int, model: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(model / "model", tmp_path / "model"))
    rng = random.Random(seed)
    with moepack.open(model / "pack") as opened:
        places = [
            (*opened.index.origin(family, kind, expert), kind.length)
            for family in opened.index.families
            for kind in family.part_kinds
            for expert in range(family.expert_count)
        ]
        places += [(t.shard, t.shard_offset, t.length) for t in opened.index.tensors()]
        shards = opened.manifest.source.shards
    shard, offset, length = rng.choice(places)
    flip(source / shards[shard].name, offset + rng.randrange(length), 1 << rng.randrange(3))
    ours, theirs = asked(model / "pack", source).findings
    assert (ours.kind, theirs.kind) == ("bytes", "gguf-py")
    assert ours[2:] == theirs[2:]
    assert theirs.message.split(", gguf-py")[0] == ours.message.split(", the source")[0]


def test_layers_and_parts_bound_it_too(model: Path) -> None:
    whole = asked(model / "pack", model / "model").gguf_py_length or 0
    one = asked(model / "pack", model / "model", layers=[1])
    some = asked(model / "pack", model / "model", part="1/10")
    assert 0 < (some.gguf_py_length or 0) < (one.gguf_py_length or 0) < whole


def test_what_the_index_says_of_a_tensor_is_held_against_gguf_py(
    model: Path, tmp_path: Path
) -> None:
    """Its witness says the same, in findings of other kinds."""
    pack = Path(shutil.copytree(model / "pack", tmp_path / "pack"))
    draft = Draft(pack)
    kind = draft.get("part_kind", 0)
    draft.set("part_kind", 0, ne0=kind.ne1, ne1=kind.ne0)
    draft.set("part_kind", 1, type_name=b"Q5_K")
    draft.set("tensor", 0, name=b"renamed.weight")
    draft.save()
    findings = [f for f in asked(pack, model / "model").findings if f.kind == "gguf-py"]
    texts = [str(finding) for finding in findings]
    assert len(texts) == 4
    assert any("its type is Q5_K; gguf-py reads Q8_0" in text for text in texts)
    assert any("gguf-py reads no renamed.weight in the source" in text for text in texts)
    assert any("gguf-py reads it in the source" in text for text in texts)
    assert any("layer 0" in text and "; gguf-py reads" in text for text in texts)


def test_a_size_that_gguf_py_has_otherwise_is_found_once(tmp_path: Path) -> None:
    """By gguf 0.19.0 a block of Q8_1 has 40 bytes, by ggml.c 36."""
    builder = moe((0,)).tensor("a.weight", (64, 3), Q8_1, 72).tensor("b.weight", (32, 2), Q8_1, 36)
    builder.tensor("last.weight", (8,), 0, 32)
    path = builder.write(tmp_path / "model.gguf")
    pack_model([path], tmp_path / "pack")
    assert verify(tmp_path / "pack", path).passed
    (finding,) = asked(tmp_path / "pack", path).findings
    words = "a block of Q8_1 has 32 elements in 36 bytes; by gguf-py 32 in 40"
    assert (finding.kind, finding.message) == ("gguf-py", words)
    report = verification_text.report(asked(tmp_path / "pack", path))
    assert report.startswith("gguf-py reads another source than moepack does\n  gguf-py: 1 finding")


def test_a_shard_that_gguf_py_refuses_is_found(tmp_path: Path) -> None:
    """It keeps the version of the file under a key that a file may have itself."""
    path = moe((0, 1)).put("GGUF.version", "u32", 3).write(tmp_path / "model.gguf")
    pack_model([path], tmp_path / "pack")
    assert verify(tmp_path / "pack", path).passed
    (finding,) = asked(tmp_path / "pack", path).findings
    assert (finding.kind, finding.file) == ("gguf-py", "model.gguf")
    assert "cannot read this shard: Duplicate GGUF.version" in finding.message


def test_a_type_of_one_dense_tensor_is_enough_to_leave_a_shard_out(tmp_path: Path) -> None:
    path = moe((0,)).tensor("strange.weight", (64, 128), 199, 7).write(tmp_path / "model.gguf")
    pack_model([path], tmp_path / "pack")
    report = asked(tmp_path / "pack", path)
    assert (report.passed, report.findings) == (None, ())
    assert report.not_looked_at[0].endswith("GGML's types 199")


def test_gguf_py_needs_a_source_and_another_model_is_said_once(
    model: Path, packs: dict[str, Path]
) -> None:
    with pytest.raises(RequestError, match="gguf-py needs a source"):
        verify(model / "pack", with_gguf_py=True)
    report = asked(model / "pack", first_shard("mixtral"))
    assert "gguf-py" not in {finding.kind for finding in report.findings}
    assert report.gguf_py_length is None
    with pytest.raises(SourceError):
        asked(model / "pack", model / "none")


@pytest.mark.long
def test_numpy_and_gguf_are_loaded_only_on_request(model: Path) -> None:
    code = (
        "import sys, moepack; pack, source, asks = sys.argv[1:]\n"
        "assert moepack.verify(pack, source, with_gguf_py=asks == 'True').passed\n"
        "assert 'click' not in sys.modules\n"
        "print('numpy' in sys.modules, 'gguf' in sys.modules)"
    )
    for asks in ("False", "True"):
        assert run_child(code, model / "pack", model / "model", asks) == f"{asks} {asks}\n"
