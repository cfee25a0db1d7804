"""Which model a folder names: where its shards lie, as people and download tools lay them out."""

import os
import shutil
from pathlib import Path

import pytest

from moepack.common.errors import MachineError, SourceError
from moepack.source.folder import model_in
from moepack.source.shards import find_shards, open_source
from tests.support.gguf_builder import GgufBuilder, moe, split, write_shards
from tests.support.models import FIXTURES

COMMIT, OLDER = "a" * 40, "b" * 40


def put_shards(folder: Path, prefix: str = "model") -> list[Path]:
    """Write a model of four shards into a new folder."""
    folder.mkdir(parents=True)
    return write_shards(split(moe(), 4), folder, prefix)


def cached(repository: Path, commit: str, *names: str) -> list[Path]:
    """Lay files of a model out as the hub's cache does: links with names, blobs without."""
    blobs, snapshot = repository / "blobs", repository / "snapshots" / commit
    links = []
    for shard in put_shards(repository / "download", names[-1]):
        blob = blobs / f"{len(list(blobs.iterdir())) if blobs.exists() else 0:064x}"
        blobs.mkdir(exist_ok=True)
        shard.rename(blob)
        link = snapshot.joinpath(*names[:-1], shard.name)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        links.append(link)
    shutil.rmtree(repository / "download")
    return links


def set_main(repository: Path, commit: str) -> None:
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def test_a_model_one_level_down_is_found_after_one_in_the_folder(tmp_path: Path) -> None:
    """Hidden folders are left alone, as the one that downloads leave behind."""
    put_shards(tmp_path / ".cache", "other")
    shards = put_shards(tmp_path / "Q4_K_M")
    assert find_shards(tmp_path) == shards
    whole = moe().write(tmp_path / "model.gguf")
    assert find_shards(tmp_path) == [whole]


def test_what_is_no_model_does_not_hide_the_model_below(tmp_path: Path) -> None:
    """As in a repository with the imatrix and the projector on top."""
    shards = put_shards(tmp_path / "Q4_K_M")
    shutil.copy(FIXTURES / "qwen3moe-imatrix.gguf", tmp_path / "imatrix.gguf")
    GgufBuilder().put("general.architecture", "str", "clip").write(tmp_path / "mmproj-F16.gguf")
    assert find_shards(tmp_path) == shards


def test_several_quantisations_are_listed_with_what_to_type(tmp_path: Path) -> None:
    first = {name: put_shards(tmp_path / name)[0] for name in ("Q4_K_M", "Q8 0")}
    with pytest.raises(SourceError, match=r"several models.*Q4_K_M/model.*Q8 0/model") as caught:
        find_shards(tmp_path)
    assert "name one file" in (caught.value.hint or "")
    listed = [note.strip() for note in caught.value.__notes__]
    assert listed == [str(first["Q4_K_M"]), f"'{first['Q8 0']}'"]


def test_a_long_list_of_models_is_cut(tmp_path: Path) -> None:
    for number in range(23):
        moe().write(tmp_path / f"{number:02}.gguf")
    with pytest.raises(SourceError) as caught:
        model_in(tmp_path)
    assert len(caught.value.__notes__) == 21
    assert caught.value.__notes__[-1] == "  … and 3 more"


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (("model",), ""),
        (("model",), "snapshots"),
        (("model",), f"snapshots/{COMMIT}"),
        (("Q4_K_M", "model"), ""),
        (("Q4_K_M", "model"), f"snapshots/{COMMIT}"),
    ],
)
def test_a_repository_in_the_cache_of_the_hub_names_its_model(
    tmp_path: Path, names: tuple[str, ...], named: str
) -> None:
    repository = tmp_path / "models--owner--name"
    links = cached(repository, COMMIT, *names)
    assert find_shards(repository / named) == links
    assert [shard.path for shard in open_source(links[2]).shards] == [str(link) for link in links]


def test_the_snapshot_of_the_main_branch_comes_first(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    links = {commit: cached(repository, commit, "model") for commit in (COMMIT, OLDER)}
    for commit in (COMMIT, OLDER):
        set_main(repository, commit)
        assert find_shards(repository) == links[commit]
    set_main(repository, "../..")
    with pytest.raises(SourceError, match="several models"):
        find_shards(repository)


def test_an_older_snapshot_counts_where_the_newest_has_no_model(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    links = cached(repository, OLDER, "model")
    (repository / "snapshots" / COMMIT).mkdir()
    set_main(repository, COMMIT)
    assert find_shards(repository) == links


def test_snapshots_that_share_a_model_are_one(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    links = cached(repository, COMMIT, "model")
    shutil.copytree(repository / "snapshots" / COMMIT, repository / "snapshots" / OLDER, True)
    assert [path.resolve() for path in find_shards(repository)] == [p.resolve() for p in links]


def test_a_link_to_one_shard_leads_to_all(tmp_path: Path) -> None:
    shards = put_shards(tmp_path / "store")
    for name in ("model.gguf", shards[2].name):
        link = tmp_path / name
        link.symlink_to(shards[2])
        assert find_shards(link) == shards
    again = tmp_path / "again.gguf"
    again.symlink_to(tmp_path / "model.gguf")
    assert find_shards(again) == shards


def test_a_link_to_a_folder_is_as_good_as_the_folder(tmp_path: Path) -> None:
    shards = put_shards(tmp_path / "store" / "Q4_K_M")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "store")
    assert [path.resolve() for path in find_shards(link)] == shards
    below = tmp_path / "below"
    below.mkdir()
    (below / "Q4_K_M").symlink_to(shards[0].parent)
    assert [path.resolve() for path in find_shards(below)] == shards


@pytest.mark.parametrize("number", [0, 2])
def test_a_link_to_nothing_is_named_as_one(tmp_path: Path, number: int) -> None:
    links = cached(tmp_path / "models--owner--name", COMMIT, "model")
    links[number].resolve().unlink()
    with pytest.raises(SourceError, match=f"{links[number].name}: a dangling link"):
        open_source(links[0])


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to(link)
    for named in (link, tmp_path):
        with pytest.raises(MachineError, match="Too many levels of symbolic links"):
            open_source(named)
