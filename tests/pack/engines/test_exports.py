"""What holds for every format: experts read back, refusals, dry runs, names, interruptions."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import MachineError, RequestError
from moepack.pack.engines.exporting import ENGINES
from moepack.storage import whole_files
from tests.support.export_readers import READERS
from tests.support.gguf_builder import moe
from tests.support.models import REAL_MODELS, first_shard, oracle, pack_model, shards_of, tree

NAMES = [engine.name for engine in ENGINES]
FUSED = "gate and up apart: layers 0-1 have them in one"
TYPES = "experts of type MXFP4: these are "
REFUSALS = {
    ("sglang", "qwen3moe"): TYPES,
    ("sglang", "ud-mixed"): TYPES,
    ("sglang", "deepseek2"): "experts in all layers from 0 on: they are in 2-3",
    ("sglang", "granite"): FUSED,
    ("sglang", "mixtral"): TYPES,
    ("moe-stream-dir", "granite"): FUSED,
}
"""The models that a format cannot express, and what is said of them."""


def target_of(engine: str, folder: Path) -> Path:
    names = {"anemll": "experts.json", "gguf": "experts.gguf"}
    return folder / names.get(engine, "experts")


def options_of(engine: str) -> dict[str, Any]:
    """Return options that make a format's files small."""
    return {"alignment": 4096} if engine == "moe-flash" else {}


@pytest.fixture(scope="module")
def natural(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pack each real model in the natural layout, which all formats take."""
    folder = tmp_path_factory.mktemp("natural")
    for model in REAL_MODELS:
        moepack.pack_model(first_shard(model), folder / model, layout="natural")
    return {model: folder / model for model in REAL_MODELS}


def expected_slices(model: str) -> dict[tuple[str, int], str]:
    """Return the SHA-256 of each weight's slices, its first digits, by llama.cpp's gguf-py."""
    return {
        (name, expert): sha256
        for name, tensor in oracle()[model].items()
        if name.endswith("_exps.weight")
        for expert, sha256 in enumerate(tensor["sha256_16"])
    }


def counts_of(model: str) -> dict[str, int]:
    """Return the number of experts of each expert tensor, of the same origin."""
    tensors = oracle()[model].items()
    return {name: one["ne"][-1] for name, one in tensors if name.endswith("_exps.weight")}


def test_each_format_has_a_reader_of_the_tests_own() -> None:
    assert set(NAMES) == READERS.keys()


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize("model", REAL_MODELS)
def test_every_expert_is_read_back_or_the_model_is_refused(
    engine: str, model: str, natural: dict[str, Path], tmp_path: Path
) -> None:
    pack, target = natural[model], target_of(engine, tmp_path)
    options = options_of(engine)
    before = tree(tmp_path)
    if (engine, model) in REFUSALS:
        with pytest.raises(RequestError, match=REFUSALS[engine, model]):
            moepack.export(engine, pack, target, **options)
        assert tree(tmp_path) == before
        return
    moepack.export(engine, pack, target, **options)
    slices = READERS[engine](target, counts_of(model))
    digests = {key: hashlib.sha256(data).hexdigest()[:16] for key, data in slices.items()}
    assert digests == expected_slices(model)
    if engine == "anemll":
        report = moepack.verify_export(engine, target, pack=pack)
        assert (report.passed, report.compared_length) == (None, target.stat().st_size)
        assert report.not_looked_at == ("the experts, which are the pack's own",)
        with pytest.raises(RequestError, match="reads experts in the pack: name that with `pack`"):
            moepack.verify_export(engine, target, source=shards_of(model))
        return
    for report in (
        moepack.verify_export(engine, target, pack=pack),
        moepack.verify_export(engine, target, source=shards_of(model)),
    ):
        assert report.passed, report.findings
        assert (report.compared_length or 0) >= sum(map(len, slices.values()))
        assert report.part_count >= len(slices)


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize("layout", ["layers", "hot-first"])
def test_the_order_in_the_pack_makes_no_difference_unless_it_is_read_in_place(
    engine: str, layout: str, natural: dict[str, Path], tmp_path: Path
) -> None:
    pack, target = tmp_path / layout, target_of(engine, tmp_path)
    counts = {(0, 3): 5, (1, 2): 9, (1, 6): 1}
    pack_model([first_shard("gpt-oss")], pack, layout, counts=counts)
    options = options_of(engine)
    if engine == "anemll":
        with pytest.raises(RequestError, match="in their order, at equal distances") as caught:
            moepack.export(engine, pack, target)
        name = first_shard("gpt-oss").name
        assert caught.value.hint == f"moepack pack {name} --layout natural -o new.moepack"
        return
    slices = []
    for one in (natural["gpt-oss"], pack):
        moepack.export(engine, one, target, force=True, **options)
        slices.append(READERS[engine](target, counts_of("gpt-oss")))
    assert slices[0] == slices[1]


@pytest.mark.parametrize("engine", NAMES)
def test_a_dry_run_writes_nothing_and_says_what_would_be(
    engine: str, natural: dict[str, Path], tmp_path: Path
) -> None:
    pack, target = natural["gpt-oss"], target_of(engine, tmp_path)
    options = options_of(engine)
    before = tree(tmp_path)
    planned = moepack.export(engine, pack, target, dry_run=True, **options)
    assert tree(tmp_path) == before
    assert not target.exists()
    assert planned.dry_run
    assert planned.free_space
    done = moepack.export(engine, pack, target, **options)
    assert (done.file_count, done.tensor_count) == (planned.file_count, planned.tensor_count)
    assert planned.length <= done.length
    assert (done.free_space, done.needed_length) == (None, None)


@pytest.mark.parametrize("engine", NAMES)
def test_what_is_there_stays_unless_it_is_the_same_or_forced(
    engine: str, natural: dict[str, Path], tmp_path: Path
) -> None:
    pack, target = natural["gpt-oss"], target_of(engine, tmp_path)
    options = options_of(engine)
    done = moepack.export(engine, pack, target, **options)
    whole = tree(tmp_path)
    assert moepack.export(engine, pack, target, resume=True, **options).kept_length == done.length
    with pytest.raises(RequestError, match="exists already"):
        moepack.export(engine, pack, target, **options)
    assert tree(tmp_path) == whole
    for name in whole.keys() - {"model.gguf"}:
        (tmp_path / name).write_bytes(b"mine")
    moepack.export(engine, pack, target, force=True, **options)
    assert tree(tmp_path) == whole


@pytest.mark.parametrize("engine", NAMES)
def test_a_damaged_byte_is_found_in_any_file(
    engine: str, natural: dict[str, Path], tmp_path: Path
) -> None:
    """Each byte of a small sample in turn, headers, manifests and padding included."""
    pack, target = natural["gpt-oss"], target_of(engine, tmp_path)
    moepack.export(engine, pack, target, **options_of(engine))
    files = sorted(target.iterdir()) if target.is_dir() else [target]
    for file in files[:3]:
        data = file.read_bytes()
        for offset in {*range(0, len(data), max(1, len(data) // 3)), len(data) - 1}:
            damaged = bytearray(data)
            damaged[offset] ^= 0x10
            file.write_bytes(damaged)
            report = moepack.verify_export(engine, target, pack=pack)
            assert report.passed is False, (file.name, offset)
        file.write_bytes(data[: len(data) // 2])
        assert moepack.verify_export(engine, target, pack=pack).passed is False
        if target.is_dir():
            file.unlink()
            report = moepack.verify_export(engine, target, pack=pack)
            assert ("missing", file.name) in {(one.kind, one.file) for one in report.findings}
        file.write_bytes(data)
    assert not moepack.verify_export(engine, target, pack=pack).findings


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("gguf", {"alignment": 1 << 16}),
        ("moe-flash", {"alignment": 1 << 15}),
        ("ggmlmoepack", {"order": "source"}),
        ("ggmlmoepack", {"order": "hotness"}),
        ("sglang", {"gguf": "given.gguf"}),
        ("sglang", {"config": "config.json"}),
    ],
)
def test_the_options_of_an_export_are_read_from_it(
    engine: str, options: dict[str, Any], natural: dict[str, Path], tmp_path: Path
) -> None:
    """The order of the hottest is in the pack alone, and found in the file."""
    pack, target = tmp_path / "pack", target_of(engine, tmp_path)
    pack_model([first_shard("gpt-oss")], pack, "hot-first", counts={(0, 3): 5, (1, 2): 9})
    (tmp_path / "config.json").write_text("{}")
    moepack.export("gguf", natural["gpt-oss"], tmp_path / "given.gguf", alignment=64)
    for name in options.keys() & {"gguf", "config"}:
        options |= {name: tmp_path / options[name]}
    moepack.export(engine, pack, target, **options)
    assert moepack.verify_export(engine, target, pack=pack).passed
    assert moepack.verify_export(engine, target, source=first_shard("gpt-oss")).passed


@pytest.mark.parametrize("text", ["[" * 100_000, '{"alignment": 1e999}', '{"alignment": {}}', "3"])
def test_a_manifest_that_says_anything_is_a_difference(
    text: str, natural: dict[str, Path], tmp_path: Path
) -> None:
    moepack.export("moe-flash", natural["gpt-oss"], tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_text(text)
    report = moepack.verify_export("moe-flash", tmp_path / "out", pack=natural["gpt-oss"])
    assert [finding.kind for finding in report.findings] == ["manifest"]


def test_a_format_that_is_not_there_is_named(natural: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such format, expected gguf, .*, found vllm"):
        moepack.export("vllm", natural["gpt-oss"], tmp_path / "x")
    with pytest.raises(RequestError, match="no such format"):
        moepack.verify_export("vllm", tmp_path, pack=natural["gpt-oss"])


def test_options_that_a_format_does_not_have_are_refused(
    natural: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="order: gguf has no such option, expected alignment"):
        moepack.export("gguf", natural["gpt-oss"], tmp_path / "x", order="source")


def test_one_thing_to_compare_with_is_needed(natural: dict[str, Path], tmp_path: Path) -> None:
    pack, source = natural["gpt-oss"], first_shard("gpt-oss")
    with pytest.raises(RequestError, match="one thing to compare with"):
        moepack.verify_export("gguf", tmp_path)
    with pytest.raises(RequestError, match="one thing to compare with"):
        moepack.verify_export("gguf", tmp_path, pack=pack, source=source)
    with pytest.raises(RequestError, match="no such file"):
        moepack.verify_export("gguf", tmp_path / "none", pack=natural["gpt-oss"])
    with pytest.raises(RequestError, match="no export of this format, expected a file"):
        moepack.verify_export("gguf", tmp_path, pack=natural["gpt-oss"])


def test_a_place_that_cannot_be_is_refused_before_anything_is_read(
    natural: dict[str, Path], tmp_path: Path
) -> None:
    pack = natural["gpt-oss"]
    (tmp_path / "file").touch()
    for target, problem in (
        (None, "no folder was given"),
        (pack, "a pack, not a folder"),
        (tmp_path / "no" / "folder", "no such folder"),
        (tmp_path / "file", "not a directory"),
    ):
        with pytest.raises(RequestError, match=problem):
            moepack.export("moe-stream-dir", pack, target)


def test_files_that_are_missing_or_do_not_belong_there_are_found(
    natural: dict[str, Path], tmp_path: Path
) -> None:
    moepack.export("moe-stream-dir", natural["qwen3moe"], tmp_path / "experts")
    (tmp_path / "experts" / "layer_01.up.bin").rename(tmp_path / "experts" / "layer_09.up.bin")
    (tmp_path / "experts" / "notes.txt").touch()
    pack = natural["qwen3moe"]
    report = moepack.verify_export("moe-stream-dir", tmp_path / "experts", pack=pack)
    found = {(finding.kind, finding.file) for finding in report.findings}
    surplus = {("surplus", "layer_09.up.bin"), ("surplus", "notes.txt")}
    assert found == {("missing", "layer_01.up.bin"), *surplus}
    other = moepack.verify_export("moe-stream-dir", tmp_path / "experts", pack=natural["mixtral"])
    assert other.headline == "the export is not whole, or not of the pack"
    assert {finding.kind for finding in other.findings} >= {"file"}


def test_many_small_files_are_synced_together_before_any_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal's commit for each of thousands of files would take longer than copying them."""
    moepack.pack_model(moe((0,), 40).write(tmp_path / "m.gguf"), tmp_path / "pack")
    target, states = tmp_path / "out", []

    def look(folder: Path) -> None:
        states.append(sorted(os.listdir(folder)))
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(whole_files, "sync_file_system", look)
        with pytest.raises(MachineError, match="cannot write: Input/output error"):
            moepack.export("moe-flash", tmp_path / "pack", target, alignment=4096)
    names = [f"L000_E{expert:04}.bin" for expert in range(40)]
    assert states == [[f"{name}.partial" for name in names]]
    assert sorted(os.listdir(target)) == states[0]
    folders: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(whole_files, "sync_directory", folders.append)
        done = moepack.export("moe-flash", tmp_path / "pack", target, alignment=4096, resume=True)
    assert folders == [target]
    assert done.kept_length == 40 * 8192
    assert sorted(os.listdir(target)) == [*names, "manifest.json"]
    assert moepack.verify_export("moe-flash", target, pack=tmp_path / "pack").passed
