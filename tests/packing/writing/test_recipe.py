"""Recipes: the same pack, to the byte, of one's own shards or of those elsewhere."""

import shutil
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import PackError, RequestError, SourceError
from moepack.packing.writing.recipe import load_recipe
from moepack.storage import scattering
from tests.support import odd_models
from tests.support.compressible import compressible
from tests.support.gguf_builder import write_shards
from tests.support.interruptions import StopHereError
from tests.support.models import FIXTURES, REAL_MODELS, flip, shards_of
from tests.support.pulls import is_same
from tests.support.remote_servers import file_server

pytestmark = pytest.mark.long

HOTNESS = FIXTURES / "qwen3moe-hotness.csv"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a small real model with choices that nobody would guess."""
    target = tmp_path_factory.mktemp("original") / "pack"
    shards = shards_of("qwen3moe")
    moepack.pack_model(shards, target, layout="hot-first", hotness=HOTNESS, alignment=16384)
    return target


@pytest.fixture
def recipe(original: Path, tmp_path: Path) -> Path:
    moepack.write_recipe(original, tmp_path / "recipe")
    return tmp_path / "recipe"


def test_one_s_own_shards_become_the_same_pack(
    recipe: Path, original: Path, tmp_path: Path
) -> None:
    for number, shard in enumerate(shards_of("qwen3moe")):  # under other names
        (tmp_path / f"mine-{number + 1:05}-of-00006.gguf").symlink_to(shard)
    summary = moepack.pack_by_recipe(
        tmp_path / "mine-00001-of-00006.gguf", recipe, tmp_path / "new"
    )
    assert is_same(tmp_path / "new", original)
    assert summary.layout == "hot-first"
    assert summary.written_length == summary.data_length
    assert {path.name for path in recipe.iterdir()} == {"recipe.json", "recipe.index"}
    assert sum(path.stat().st_size for path in recipe.iterdir()) < 40_000


def test_so_do_shards_that_are_elsewhere(
    recipe: Path, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(scattering, "RANGE_LENGTH", 100_000)
    with file_server(FIXTURES) as server:
        address = f"{server.url}/{Path(shards_of('qwen3moe')[0]).name}"
        moepack.pack_by_recipe(address, recipe, tmp_path / "new")
    assert is_same(tmp_path / "new", original)


@pytest.mark.parametrize("model", [*REAL_MODELS, *odd_models.MODELS])
def test_every_kind_of_model_has_one(model: str, tmp_path: Path) -> None:
    if model in REAL_MODELS:
        shards = [Path(shard) for shard in shards_of(model)]
    else:
        shards = odd_models.write(model, tmp_path / "model")
    moepack.pack_model(shards, tmp_path / "pack", experts_only=model == "mixtral")
    moepack.write_recipe(tmp_path / "pack", tmp_path / "recipe")
    moepack.pack_by_recipe(shards, tmp_path / "recipe", tmp_path / "new")
    assert is_same(tmp_path / "new", tmp_path / "pack")


def test_a_ranked_pack_keeps_its_ranking(original: Path, tmp_path: Path) -> None:
    ranked = Path(shutil.copytree(original, tmp_path / "ranked"))
    (tmp_path / "hot.csv").write_text("layer,expert,count\n0,1,50\n1,3,40\n")
    moepack.rank_pack(ranked, tmp_path / "hot.csv")
    moepack.write_recipe(ranked, tmp_path / "recipe")
    moepack.pack_by_recipe(shards_of("qwen3moe"), tmp_path / "recipe", tmp_path / "new")
    with moepack.Pack(tmp_path / "new") as pack:
        assert pack.hottest("200KiB")[:2] == [(0, 1), (1, 3)]
    assert moepack.verify(tmp_path / "new", shards_of("qwen3moe")).passed


def test_another_model_is_refused_before_anything_is_written(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not the model of the recipe"):
        moepack.pack_by_recipe(shards_of("granite"), recipe, tmp_path / "new")
    with pytest.raises(SourceError, match="not the model of the recipe"):
        moepack.pack_by_recipe(shards_of("ud-mixed"), recipe, tmp_path / "new")
    renamed = [Path(shutil.copy(path, tmp_path)) for path in shards_of("qwen3moe")]
    flip(renamed[0], renamed[0].read_bytes().index(b"Qwen3Moe"))
    with pytest.raises(SourceError, match="not the model of the recipe"):
        moepack.pack_by_recipe(renamed, recipe, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_part_with_other_bytes_is_never_committed(
    recipe: Path, original: Path, tmp_path: Path
) -> None:
    with moepack.Pack(original) as pack:
        (kind, *_) = pack.parts(1)
        shard, offset, stride, _ = kind.origin
    shards = [Path(shutil.copy(path, tmp_path)) for path in shards_of("qwen3moe")]
    flip(shards[shard], offset + 5 * stride + 7)
    with pytest.raises(SourceError, match="layer 1 expert 5 .* do not have the digest"):
        moepack.pack_by_recipe(shards, recipe, tmp_path / "new")
    assert not (tmp_path / "new" / "manifest.json").exists()


def test_what_was_interrupted_goes_on(recipe: Path, original: Path, tmp_path: Path) -> None:
    done = 0

    def stop(length: int, total: int) -> None:
        nonlocal done
        done += length
        if done > 0.9 * total:
            raise StopHereError

    with pytest.raises(StopHereError):
        moepack.pack_by_recipe(
            shards_of("qwen3moe"), recipe, tmp_path / "new", threads=1, progress=stop
        )
    assert not (tmp_path / "new" / "manifest.json").exists()
    moepack.pack_by_recipe(shards_of("qwen3moe"), recipe, tmp_path / "new", resume=True)
    assert is_same(tmp_path / "new", original)


@pytest.mark.parametrize("name", ["recipe.json", "recipe.index"])
@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_recipe_with_any_byte_changed_or_cut_is_refused(
    name: str, step: int, recipe: Path, tmp_path: Path
) -> None:
    path = recipe / name
    data = path.read_bytes()
    for offset in (*range(0, len(data), step), len(data) - 1):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 0x04]) + data[offset + 1 :])
        with pytest.raises(PackError):
            load_recipe(recipe)
    for length in range(0, len(data), 397):
        path.write_bytes(data[:length])
        with pytest.raises(PackError):
            moepack.pack_by_recipe(shards_of("qwen3moe"), recipe, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    write_shards([compressible()], tmp_path)
    moepack.pack_model(next(tmp_path.glob("*.gguf")), tmp_path / "zstd", codec="zstd")
    return tmp_path / "zstd"


def test_packs_without_one_are_named(coded: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="no recipe of it: some parts are stored by a codec"):
        moepack.write_recipe(coded, tmp_path / "recipe")
    moepack.index_model(shards_of("granite"), tmp_path / "index")
    with pytest.raises(PackError, match="an index over shards"):
        moepack.write_recipe(tmp_path / "index", tmp_path / "recipe")
    with pytest.raises(PackError, match="not a recipe"):
        moepack.pack_by_recipe(shards_of("granite"), tmp_path, tmp_path / "new")


def test_nothing_is_written_over(recipe: Path, original: Path) -> None:
    with pytest.raises(RequestError, match="exists already"):
        moepack.write_recipe(original, recipe)
    with pytest.raises(RequestError, match="a whole pack is here already"):
        moepack.pack_by_recipe(shards_of("qwen3moe"), recipe, original)
