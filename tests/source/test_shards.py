"""Which files make one model: shards found, ordered, and checked against each other."""

import shutil
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import SourceError
from moepack.source.shards import open_source
from tests.support.gguf_builder import GgufBuilder, moe, split, write_shards
from tests.support.models import REAL_MODELS, shards_of
from tests.support.warm_command import Run


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Write a model of four shards."""
    return write_shards(split(moe(), 4), tmp_path)


@pytest.mark.parametrize("model", REAL_MODELS)
def test_any_one_shard_names_the_whole_model(model: str) -> None:
    whole = shards_of(model)
    assert len(whole) > 1
    for path in whole:
        assert [shard.path for shard in open_source([path]).shards] == whole


def test_a_first_shard_without_tensors_is_sound(tmp_path: Path) -> None:
    shards = split(moe(), 4)
    empty = GgufBuilder(metadata=shards[0].metadata)
    shards[0].metadata = []
    shards = [empty, *shards]
    for number, shard in enumerate(shards):
        shard.put("split.no", "u16", number).put("split.count", "u16", len(shards))
        shard.put("split.tensors.count", "i32", len(moe().tensors))
    paths = write_shards(shards, tmp_path)
    assert open_source([paths[2]]).architecture == "qwen3moe"


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00001.gguf"])
def test_a_split_count_of_0_or_1_means_not_split(tmp_path: Path, count: int, name: str) -> None:
    builder = moe().put("split.no", "u16", 0).put("split.count", "u16", count)
    builder.put("split.tensors.count", "i32", len(builder.tensors))
    assert len(open_source([builder.write(tmp_path / name)]).shards) == 1


def test_a_missing_shard_is_named(shards: list[Path]) -> None:
    shards[2].unlink()
    with pytest.raises(SourceError, match="1 of 4 shards are missing.*00003-of-00004"):
        open_source([shards[0]])
    with pytest.raises(SourceError, match=r"split\.count.*expected 4 shards, found 3"):
        open_source([shards[0], shards[1], shards[3]])


def test_a_whole_model_under_the_name_of_a_shard_is_read_by_its_header(
    tmp_path: Path, cli: Run
) -> None:
    path = moe().write(tmp_path / "all-00003-of-00013.gguf")
    assert [Path(shard.path) for shard in open_source(path).shards] == [path]
    assert moepack.inspect(tmp_path) == moepack.inspect(path)
    note = "note: a whole model by its header, though its name is all-00003-of-00013.gguf"
    assert note in cli("inspect", path).stdout
    assert "note" not in cli("inspect", path.rename(tmp_path / "all.gguf")).stdout


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("model", ["deepseek2", "gpt-oss"])
def test_shards_that_were_joined_by_cat_are_told(
    model: str, is_padded: bool, tmp_path: Path
) -> None:
    """The first one may have no tensors, and padding at its end."""
    first, second = map(Path, shards_of(model)[:2])
    data = first.read_bytes()
    data += bytes(-len(data) % 32 if is_padded else 0)
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(data + second.read_bytes())
    with pytest.raises(
        SourceError, match=r"byte [\d,]+: other files follow the first one"
    ) as caught:
        open_source(joined)
    assert "llama-gguf-split --merge" in (caught.value.hint or "")


def test_a_shard_listed_twice_is_named(shards: list[Path]) -> None:
    with pytest.raises(SourceError, match="00002-of-00004.*listed twice"):
        open_source([*shards, shards[1]])


def test_two_files_that_are_the_same_shard_are_both_named(shards: list[Path]) -> None:
    copy = shutil.copy(shards[1], shards[1].with_name("copy.gguf"))
    with pytest.raises(SourceError, match=r"same shard.*as .*"):
        open_source([*shards, copy])


def test_a_shard_renamed_out_of_the_pattern_is_explained(shards: list[Path]) -> None:
    lost = shards[1].rename(shards[1].with_name("lost.gguf"))
    with pytest.raises(SourceError, match="one shard of several") as caught:
        open_source([lost])
    assert "list all shards" in (caught.value.hint or "")


def test_a_name_that_contradicts_the_header_is_refused_in_a_list(shards: list[Path]) -> None:
    wrong = shards[1].rename(shards[1].with_name("model-00001-of-00009.gguf"))
    with pytest.raises(SourceError, match="name and the header name different shards"):
        open_source([shards[0], wrong, *shards[2:]])


def test_shards_of_another_model_are_refused_by_name(shards: list[Path]) -> None:
    other = shards[1].rename(shards[1].with_name("another-00002-of-00004.gguf"))
    with pytest.raises(SourceError, match="different models.*another"):
        open_source([shards[0], other, *shards[2:]])


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    shards = split(moe(), 4)
    shards[1].tensors[0].name = shards[0].tensors[0].name
    with pytest.raises(SourceError, match=r"token_embd\.weight.*stands in two shards"):
        open_source([write_shards(shards, tmp_path)[0]])


@pytest.mark.parametrize(
    ("shard", "key", "type_name", "value", "message"),
    [
        (0, "split.tensors.count", "i32", 99, "expected 14, found 99"),
        (1, "split.tensors.count", "i32", 99, "expected 14, found 99"),
        (2, "split.count", "u16", 9, "expected 4, found 9"),
        (2, "split.no", "u16", 1, "expected 2, found 1"),
        (0, "split.count", "u32", 4, "expected u16, found u32"),
        (2, "split.no", "i32", 2, "expected u16, found i32"),
    ],
)
def test_shards_that_disagree_are_named(
    tmp_path: Path, shard: int, key: str, type_name: str, value: int, message: str
) -> None:
    shards = split(moe(), 4)
    assert (len(shards), sum(len(each.tensors) for each in shards)) == (4, 14)
    shards[shard].put(key, type_name, value)
    with pytest.raises(SourceError, match=message):
        open_source([write_shards(shards, tmp_path)[0]])


def test_each_shard_has_an_alignment_of_its_own(tmp_path: Path) -> None:
    shards = split(moe(), 4)
    shards[1].alignment = 256
    shards[1].put("general.alignment", "u32", 256)
    source = open_source([write_shards(shards, tmp_path)[0]])
    assert [shard.alignment for shard in source.shards][:3] == [32, 256, 32]
