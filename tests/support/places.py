"""Every place where a pack can lie, in one form: the contract of open packs runs over them."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.paths import RemotePath
from moepack.storage.remote.stores import store_of
from tests.support.buckets import bucket_of_moto
from tests.support.faulty_backend import require
from tests.support.hubs import REPOSITORY, hub_of
from tests.support.models import contents, shards_of
from tests.support.nginx import nginx_of
from tests.support.packs import mirror
from tests.support.pulls import copy_pack, quick_stores, store_of_packs

Edit = Callable[[bytes], bytes | None]
"""Makes of the bytes of a file others, or None: then it is removed."""


@dataclass
class Place:
    """A pack by its address, and the folders or the bucket in which its bytes lie.

    `options` are those with which a reader reads from all of them, `undo` what brings back what was
    changed.
    """

    address: str | Path
    folders: tuple[Path, ...] = ()
    is_remote: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    undo: list[Callable[[], object]] = field(default_factory=list)

    def change(self, name: str, edit: Edit) -> None:
        """Change a file wherever it lies."""
        for folder in self.folders:
            path = (folder / name).resolve()
            before = path.read_bytes()
            self.undo.append(partial(path.write_bytes, before))
            if (data := edit(before)) is None:
                path.unlink()
            else:
                path.write_bytes(data)
        if not self.folders:
            path = RemotePath(f"{self.address}/{name}")
            store = store_of(path)
            before = store.read(path.key, 1 << 30)
            self.undo.append(partial(store.put, path.key, before))
            if (data := edit(before)) is None:
                store.delete(path.key)
            else:
                store.put(path.key, data)


def _folder(pack: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    path = copy_pack(pack, folder)
    yield Place(path, (path,))


def _index(pack: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    (folder / "shards").mkdir()
    shards = [shutil.copy(shard, folder / "shards") for shard in shards_of("qwen3moe")]
    moepack.index_model(shards[0], folder / "index", digests=True)
    yield Place(folder / "index", (folder / "index",))


def _mirror(pack: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    path = copy_pack(pack, folder)
    yield Place(path, (path, mirror(path)), options={"backend": require("direct", path)})


def _web(pack: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    (folder / "store").mkdir()
    path = copy_pack(pack, folder / "store")
    with store_of_packs(folder / "store", patch) as server:
        yield Place(f"{server.url}/{path.name}", (path,), is_remote=True)


def _nginx(pack: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    (folder / "store").mkdir()
    path = copy_pack(pack, folder / "store")
    with quick_stores(folder / "cache", patch), nginx_of(folder / "store", folder / "nginx") as url:
        yield Place(f"{url}/{path.name}", (path,), is_remote=True)


def _part(pack: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Pull half of the experts, and leave the others where they come from."""
    for place in _web(pack, folder, patch):
        moepack.pull(place.address, folder / "part", hottest="600kB")
        yield Place(folder / "part", (folder / "part", *place.folders))


def _bucket(pack: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with bucket_of_moto() as bucket:
        address = f"{bucket}/a.moepack"
        for name, data in contents(pack).items():
            path = RemotePath(f"{address}/{name}")
            store_of(path).put(path.key, data)
        yield Place(address, is_remote=True)


def _hub(pack: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with hub_of(folder / "hub", patch, [pack]) as hub:
        path = hub.folder / REPOSITORY / pack.name
        yield Place(f"hf://{REPOSITORY}/{pack.name}", (path,), is_remote=True)


PLACES = {
    "folder": _folder,
    "index over shards": _index,
    "mirror": _mirror,
    "part and origin": _part,
    "web server": _web,
    "nginx": _nginx,
    "bucket": _bucket,
    "hub": _hub,
}


@contextlib.contextmanager
def placed(name: str, pack: Path, folder: Path) -> Iterator[Place]:
    """Lay a pack of qwen3moe in a place for the block."""
    with pytest.MonkeyPatch.context() as patch:
        yield from PLACES[name](pack, folder, patch)
