"""Models that are elsewhere, in the user's cache: fetched before they run, and found again there.

    ~/.cache/moepack/models/hf/OWNER/NAME/COMMIT/UD-Q4_K_XL/MODEL.moepack
    ~/.cache/moepack/models/s3/BUCKET/VERSION/KEY.moepack

A GGUF becomes a pack, which stores it once, and a pack is pulled; both go on after an interruption.
A commit is the first digits of that on the hub. A version is made of the manifest of a pack, or of
the stamps of shards. Where the hub's own cache has the shards already, these are used as they lie.
A newer version takes the place of older ones, but for those that were named by their commit.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, SourceError, open_failure
from moepack.common.paths import PathOrPaths, path_list
from moepack.common.phases import Progress
from moepack.common.remote_path import RemotePath, is_remote
from moepack.common.sizes import size_text
from moepack.pack.format import manifest
from moepack.pack.reading.directory import named_pack, read_manifest
from moepack.packing.copies.pull import pull
from moepack.packing.pack_model import pack_model
from moepack.source.folder import SHARD_NAME
from moepack.source.remote_model import choose_on_hub, find_remote_shards
from moepack.storage.input_file import open_input
from moepack.storage.remote import hub
from moepack.storage.remote.stores import named_on_hub, resolve
from moepack.storage.user_folder import user_folder

_SUFFIX = ".moepack"
_KEPT_SUFFIX = ".kept"
"""Of the mark beside a pack that was named by its commit."""
_VERSION_LENGTH = 12
_GO_ON = "run the same command again: it goes on from what is there"
_NO_SPACE = "free some space, or name a folder on another drive in XDG_CACHE_HOME"


class FetchPlan(NamedTuple):
    """A model that is about to be fetched: its address, the new pack's path and its bytes.

    `cache` is the folder of all fetched models, which take `cache_length` bytes of its drive now.
    """

    address: str
    path: str
    length: int
    cache: str
    cache_length: int


def fetch_model(
    model: PathOrPaths,
    *,
    planned: Callable[[FetchPlan], None] | None = None,
    notice: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> PathOrPaths:
    """Return where a model is on this machine; one that is elsewhere is fetched first.

    A path is returned as it is. For the address of a GGUF or a pack it is a pack in the user's
    cache (`XDG_CACHE_HOME`), or the shards in the hub's own cache. One that is there is not fetched
    again: for an address with a commit nothing is asked of the network; for any other, its newest
    version is, and if that cannot be reached the one that is here is taken, with a `notice`. A
    version that came now replaces older ones of the same address, with a `notice` of each; those
    stay that were named by their commit once, or that a program has open.
    `planned` is called before anything is fetched, `progress` as for `pull`. After an interruption
    the same call goes on.

    Raises SourceError, PackError or MachineError, as `pack_model` and `pull`.
    """
    names = path_list(model)
    if len(names) != 1 or not is_remote(names[0]):
        return model
    place = _Place.of(os.fspath(names[0]))
    if (pack := place.find_pinned()) is not None:
        _keep(pack)
        return pack
    try:
        source = _find(place)
    except MachineError as error:
        return _without_network(place, error, notice)
    if isinstance(source, list):
        return source
    if not (source.target / manifest.NAME).exists():
        source.target.parent.mkdir(parents=True, exist_ok=True)
        with _going_on():
            _fetch(source, planned, progress)
        if not place.is_pinned:
            _remove_older(place.folder, source.target, notice)
    if place.is_pinned:
        _keep(source.target)
    return source.target


def _keep(model: PathOrPaths) -> None:
    """Mark a pack of the cache as named by its commit."""
    if isinstance(model, Path):
        with contextlib.suppress(OSError):
            model.with_suffix(_KEPT_SUFFIX).touch()


def _remove_older(folder: Path, target: Path, notice: Callable[[str], None] | None) -> None:
    """Remove the other versions of the pack `target`, which is whole now."""
    key = target.relative_to(folder).as_posix().partition("/")[2]
    for older in folder.glob(f"*/{glob.escape(key)}"):
        if older == target or older.with_suffix(_KEPT_SUFFIX).exists() or _is_open(older):
            continue
        length = _length_on_disk(older)
        with contextlib.suppress(OSError):
            (older / manifest.NAME).unlink()  # first, so that a rest is no pack
        shutil.rmtree(older, ignore_errors=True)
        if notice is not None:
            notice(f"an older version was removed, {size_text(length)}: {older}")


def _is_open(folder: Path) -> bool:
    """Return whether a program of this user has a file of a folder open."""
    prefix = os.path.realpath(folder) + os.sep
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is another user's
            if os.readlink(descriptor).startswith(prefix):
                return True
    return False


def _length_on_disk(folder: Path) -> int:
    """Return the bytes that the files below a folder take of its drive."""
    length = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            length += path.lstat().st_blocks * 512
    return length


def _models_folder() -> Path:
    """Return the folder of all fetched models. Raises MachineError."""
    cache = user_folder("XDG_CACHE_HOME", ".cache")
    if cache is None:
        hint = "name one in XDG_CACHE_HOME, or use `moepack pack`, `moepack pull`"
        raise MachineError("there is no folder for models", hint=hint)
    return cache / "models"


class _Place(NamedTuple):
    """The folder in the cache for an address: `inner` names the model in it.

    On the hub there are a `repository` and a `revision`.
    """

    address: str
    folder: Path
    inner: str
    repository: str = ""
    revision: str = ""

    @classmethod
    def of(cls, address: str) -> _Place:
        """Return the place for an address. Raises SourceError, MachineError."""
        models = _models_folder()
        address = named_on_hub(address)
        if address.lower().startswith("hf:"):
            named = hub.parse(address)
            folder = models / "hf" / named.repository
            return cls(address, folder, named.inner, named.repository, named.revision)
        path = resolve(address)
        scheme, _, host = path.store.partition("://")
        folder = models / scheme / host
        return cls(address, folder, path.key)

    @property
    def is_pinned(self) -> bool:
        """Whether the address names a commit."""
        return hub.is_commit(self.revision)

    def find_pinned(self) -> PathOrPaths | None:
        """Return the model if it is here and its address names a commit; None if it is not."""
        if not self.is_pinned:
            return None
        return self.find(_short(self.revision)) or self.cached_shards(self.revision)

    def find(self, version: str = "*") -> Path | None:
        """Return the newest whole pack here; None without one, and if several models fit."""
        packs: dict[str, list[Path]] = {}
        for path in self.folder.glob(f"{version}/**/*{_SUFFIX}/{manifest.NAME}"):
            key = path.parent.relative_to(self.folder).as_posix().partition("/")[2]
            name = key.removesuffix(_SUFFIX)
            if _is_named(self.inner, name, is_on_hub=bool(self.repository)):
                packs.setdefault(key, []).append(path)
        if len(packs) != 1:
            return None
        (versions,) = packs.values()
        return max(versions, key=lambda path: path.stat().st_mtime_ns).parent

    def cached_shards(self, revision: str) -> list[Path] | None:
        """Return the shards in the hub's own cache; None if they are not all there."""
        cached = hub.cached_snapshot(self.repository, revision) if self.repository else None
        if cached is None:
            return None
        commit, snapshot = cached
        files = {
            path.relative_to(snapshot).as_posix(): path.stat().st_size
            for path in snapshot.rglob("*.gguf")
            if path.exists()
        }
        try:
            root = RemotePath(f"hf://{self.repository}@{commit}")
            shards = choose_on_hub(root / self.inner, files)
        except SourceError:
            return None
        if not all(shard.key in files for shard in shards):
            return None
        return [snapshot / shard.key for shard in shards]

    def target(self, version: str, key: str) -> Path:
        """Return the path of a pack in the cache."""
        name = key.removesuffix(_SUFFIX) + _SUFFIX
        return self.folder / _short(version) / name


class _Source(NamedTuple):
    """A model that is to be fetched to `target`: the address of a pack, or of a GGUF."""

    address: str
    target: Path
    is_pack: bool


def _find(place: _Place) -> _Source | list[Path]:
    """Return the newest model at an address, or its shards in the hub's cache.

    Raises SourceError for none, MachineError if it cannot be asked for.
    """
    path = resolve(place.address)
    commit = path.store.rpartition("@")[2] if place.repository else None
    pack = named_pack(path)
    if pack is not None:
        version = commit or f"{digest.xxh3(read_manifest(pack)):016x}"
        return _Source(str(pack), place.target(version, path.key), is_pack=True)
    shards = find_remote_shards(str(path))
    if commit is not None and (cached := place.cached_shards(commit)) is not None:
        return cached
    match = SHARD_NAME.match(shards[0].key)
    key = match["prefix"] if match else shards[0].key.removesuffix(".gguf")
    version = commit or _version(shards)
    return _Source(str(shards[0]), place.target(version, key), is_pack=False)


def _version(shards: list[RemotePath]) -> str:
    """Return a text that is another one if a shard is replaced."""
    try:
        stamps = [open_input(shard).stamp for shard in shards]
    except FileNotFoundError:
        raise SourceError("no such model", path=shards[0]) from None
    except OSError as error:
        raise open_failure(error, shards[0]) from None
    return f"{digest.xxh3(repr(stamps).encode()):016x}"


def _without_network(
    place: _Place, error: MachineError, notice: Callable[[str], None] | None
) -> PathOrPaths:
    """Return the model that is here, since its newest version cannot be asked for."""
    model: PathOrPaths | None = place.find() or place.cached_shards(place.revision)
    if model is None:
        raise error
    if notice is not None:
        path = model if isinstance(model, Path) else path_list(model)[0]
        notice(f"{error.problem}; the model is used as it is in {path}")
    return model


def _fetch(
    source: _Source,
    planned: Callable[[FetchPlan], None] | None,
    progress: Progress | None,
) -> None:
    cache = _models_folder()

    def announce(length: int) -> None:
        if planned is not None:
            path = str(source.target)
            planned(FetchPlan(source.address, path, length, str(cache), _length_on_disk(cache)))

    if source.is_pack:
        pull(
            source.address,
            source.target,
            planned=lambda summary: announce(summary.all_length),
            progress=progress,
        )
    else:
        pack_model(
            source.address,
            source.target,
            resume=source.target.exists(),
            planned=lambda summary: announce(summary.data_length),
            progress=progress,
        )


@contextlib.contextmanager
def _going_on() -> Iterator[None]:
    """Say after a failure or an interruption how to go on, in place of `pack_model`'s advice."""
    try:
        yield
    except MachineError as error:
        is_full = error.problem in ("not enough space", "no space left")
        error.hint = f"{_NO_SPACE}; then {_GO_ON}" if is_full else _after(error.hint)
        raise
    except MoepackError as error:
        error.hint = _after(error.hint)
        raise
    except KeyboardInterrupt as stop:
        stop.__notes__ = [_GO_ON]
        raise


def _after(hint: str | None) -> str:
    """Return a hint, and then how to go on."""
    if hint is None or "resume" in hint or _GO_ON in hint:
        return _GO_ON
    return f"{hint}; then {_GO_ON}"


def _short(version: str) -> str:
    return version[:_VERSION_LENGTH]


def _is_named(inner: str, key: str, *, is_on_hub: bool) -> bool:
    """Return whether an address that names `inner` names the model `key` of the cache.

    On the hub it may be a quantisation.
    """
    name = inner.removesuffix(_SUFFIX)
    if match := SHARD_NAME.match(name):
        name = match["prefix"]
    name = name.removesuffix(".gguf")
    if not name or key == name or key.startswith(f"{name}/"):
        return True
    words = key.lower().split("/") if is_on_hub else []
    return any(word == name.lower() or word.endswith(f"-{name.lower()}") for word in words)
