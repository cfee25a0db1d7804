"""Models that are elsewhere, in the user's cache: fetched before they run, and found again there.

    ~/.cache/moepack/models/hf/OWNER/NAME/COMMIT/UD-Q4_K_XL/MODEL.moepack
    ~/.cache/moepack/models/s3/BUCKET/VERSION/KEY.moepack

A GGUF becomes a pack, which stores it once, and a pack is pulled; both resume after an
interruption. COMMIT is the first digits of the hub's commit. VERSION is a digest of a pack's
manifest, or of the stamps of shards. Shards in the hub's own cache are used as they lie. A newer
version replaces older ones, unless they were named by their commit.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, SourceError, open_failure
from moepack.common.paths import PathOrPaths, RemotePath, is_remote, path_list
from moepack.common.phases import Progress
from moepack.common.sizes import size_text
from moepack.pack.format import manifest
from moepack.pack.reading.directory import named_pack, read_manifest
from moepack.packing.copies.pull import pull
from moepack.packing.pack_model import pack_model
from moepack.source.folder import SHARD_NAME, commit_in_cache
from moepack.source.remote_model import choose_on_hub, find_remote_shards
from moepack.storage.folders import user_folder
from moepack.storage.input_file import open_input
from moepack.storage.remote import hub
from moepack.storage.remote.stores import named_on_hub, resolve

_SUFFIX = ".moepack"
_KEPT_SUFFIX = ".kept"
"""Of the mark beside a pack that was named by its commit."""
_VERSION_LENGTH = 12
_GO_ON = "run the same command again: it goes on from what is there"
_FULL = ("not enough space", "no space left")
_NO_SPACE = "free some space, or name a folder on another drive in XDG_CACHE_HOME"


class FetchPlan(NamedTuple):
    """A model that is about to be fetched: its address, the new pack's path and its bytes.

    `cache` is the folder of all fetched models, which occupy `cache_length` bytes now.
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
    """Return the path of a model on this machine; fetch a model at an address first.

    A path is returned as it is. The address of a GGUF or a pack leads to a pack in the user's cache
    (`XDG_CACHE_HOME`), or to shards in the hub's own cache. A model that is there is not fetched
    again: an address with a commit needs no network; for any other the newest version is looked up,
    and without a network the cached version is returned, with a `notice`. A fetched version
    replaces older ones of the same address, with a `notice` of each, unless they were named by
    their commit or a program has them open. `planned` is called before anything is fetched,
    `progress` as for `pull`. After an interruption, call it again to resume.

    Raises SourceError, PackError or MachineError, as `pack_model` and `pull`.
    """
    names = path_list(model)
    if len(names) != 1 or not is_remote(names[0]):
        return model
    models = _models_folder()
    if models is None:
        hint = "name one in XDG_CACHE_HOME, or use `moepack pack`, `moepack pull`"
        raise MachineError("there is no folder for models", hint=hint)
    place = _Place.of(os.fspath(names[0]), models)
    is_pinned = hub.is_commit(place.revision)
    here = place.find(place.revision[:_VERSION_LENGTH]) if is_pinned else None
    if here is None:
        source = _find_or_fall_back(place, notice)
        if not isinstance(source, _Remote):
            return source
        here = source.target
        if not (here / manifest.NAME).exists():
            _fetch(source, models, planned, progress)
            if not is_pinned:
                _remove_older(place.folder, here, notice)
    if is_pinned and isinstance(here, Path):
        with contextlib.suppress(OSError):
            mark_of(here).touch()
    return here


def _models_folder() -> Path | None:
    cache = user_folder("XDG_CACHE_HOME", ".cache")
    return None if cache is None else cache / "models"


def _remove_older(folder: Path, target: Path, notice: Callable[[str], None] | None) -> None:
    key = target.relative_to(folder).as_posix().partition("/")[2]
    for older in folder.glob(f"*/{glob.escape(key)}"):
        if older == target or mark_of(older).exists() or is_open(older):
            continue
        length = length_on_disk(older)
        remove_fetched(older)
        if notice is not None:
            notice(f"an older version was removed, {size_text(length)}: {older}")


def is_open(folder: Path) -> bool:
    """Return whether a program of this user has a folder, or a file in it, open."""
    prefix = os.path.realpath(folder) + os.sep
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is another user's
            if f"{os.readlink(descriptor)}{os.sep}".startswith(prefix):
                return True
    return False


def length_on_disk(path: Path) -> int:
    """Return the bytes that a file, or the files below a folder, take of their drive."""
    length = 0
    for file in path.rglob("*") if path.is_dir() else (path,):
        with contextlib.suppress(OSError):  # it was removed meanwhile
            length += file.lstat().st_blocks * 512
    return length


class FetchedModel(NamedTuple):
    """A model in the user's cache, whole or not: `key` within `store`, such as `hf/OWNER/NAME`.

    `version` is the beginning of a commit, or of a digest.
    """

    store: str
    version: str
    key: str
    path: Path

    @property
    def address(self) -> str:
        """The address that it is fetched from."""
        return f"{self.store.replace('/', '://', 1)}/{self.key}"

    def is_named(self, address: str) -> bool:
        """Return whether an address names this model. Raises SourceError."""
        place = _Place.of(address, Path())
        is_pinned = hub.is_commit(place.revision)
        if place.folder.as_posix() != self.store:
            return False
        if is_pinned and not place.revision.startswith(self.version):
            return False
        return _is_named(place.inner, self.key, is_on_hub=bool(place.repository))


_FETCHED = re.compile(
    r"(?P<store>hf/[^/]+/[^/]+|[^/]+/[^/]+)/(?P<version>[0-9a-f]{12})/(?P<key>.+)\.moepack",
    re.DOTALL,
)


def fetched_models() -> Iterator[FetchedModel]:
    """Yield the models in the user's cache, by path."""
    models = _models_folder()
    for folder, names, _ in os.walk(models or ""):
        packs = sorted(name for name in names if name.endswith(_SUFFIX))
        names[:] = sorted(set(names) - set(packs))
        for path in (Path(folder, name) for name in packs):
            match = _FETCHED.fullmatch(path.relative_to(models or "").as_posix())
            if match and not path.is_symlink():
                yield FetchedModel(match["store"], match["version"], match["key"], path)


def mark_of(folder: Path) -> Path:
    """Return the path of the mark beside a pack that was named by its commit."""
    return folder.with_suffix(_KEPT_SUFFIX)


def remove_fetched(folder: Path) -> None:
    """Remove a fetched model, as far as that is possible."""
    with contextlib.suppress(OSError):
        (folder / manifest.NAME).unlink()  # first, so that a rest is no pack
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        mark_of(folder).unlink(missing_ok=True)
        for parent in folder.parents:
            if parent == _models_folder():
                break
            parent.rmdir()  # an error ends it: another model is there


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
    def of(cls, address: str, models: Path) -> _Place:
        """Return the place for an address. Raises SourceError."""
        address = named_on_hub(address)
        if address.lower().startswith("hf:"):
            repository, revision, inner = hub.parse(address)
            return cls(address, models / "hf" / repository, inner, repository, revision)
        path = resolve(address)
        scheme, _, host = path.store.partition("://")
        return cls(address, models / scheme / host, path.key)

    def find(self, version: str = "*") -> Path | list[Path] | None:
        """Return the newest whole pack here, or else the shards in the hub's own cache.

        None if neither is here, or if several models fit.
        """
        packs: dict[str, list[Path]] = {}
        for path in self.folder.glob(f"{version}/**/*{_SUFFIX}/{manifest.NAME}"):
            key = path.parent.relative_to(self.folder).as_posix().partition("/")[2]
            name = key.removesuffix(_SUFFIX)
            if _is_named(self.inner, name, is_on_hub=bool(self.repository)):
                packs.setdefault(key, []).append(path)
        if len(packs) != 1:
            return self.cached_shards(self.revision)
        (versions,) = packs.values()
        return max(versions, key=lambda path: path.stat().st_mtime_ns).parent

    def cached_shards(self, revision: str) -> list[Path] | None:
        """Return the shards in the hub's own cache; None if they are not all there."""
        folder = hub.cache_folder(self.repository) if self.repository else None
        if folder is None:
            return None
        commit = revision if hub.is_commit(revision) else commit_in_cache(folder, revision)
        if commit is None:
            return None
        snapshot = folder / "snapshots" / commit
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
        are_all_there = all(shard.key in files for shard in shards)
        return [snapshot / shard.key for shard in shards] if are_all_there else None


class _Remote(NamedTuple):
    """A model at an address, of a pack if it `is_pack`, and the path of its pack here."""

    address: str
    target: Path
    is_pack: bool


def _find_or_fall_back(
    place: _Place, notice: Callable[[str], None] | None
) -> _Remote | Path | list[Path]:
    """Return the newest model at an address; without a network, the path of the one that is here.

    A commit has no other version to fall back to.
    """
    try:
        return _find(place)
    except MachineError as error:
        here = None if hub.is_commit(place.revision) else place.find()
        if here is None:
            raise
        if notice is not None:
            path = here if isinstance(here, Path) else here[0]
            notice(f"{error.problem}; the model is used as it is in {path}")
        return here


def _find(place: _Place) -> _Remote | list[Path]:
    """Return the newest model at an address, or its shards in the hub's cache."""
    path = resolve(place.address)
    version = path.store.rpartition("@")[2] if place.repository else None
    pack = named_pack(path)
    if pack is not None:
        address, key = str(pack), path.key.removesuffix(_SUFFIX)
        version = version or f"{digest.xxh3(read_manifest(pack)):016x}"
    else:
        shards = find_remote_shards(str(path))
        if version is not None and (cached := place.cached_shards(version)) is not None:
            return cached
        match = SHARD_NAME.match(shards[0].key)
        address = str(shards[0])
        key = match["prefix"] if match else shards[0].key.removesuffix(".gguf")
        version = version or _version_of(shards)
    target = place.folder / version[:_VERSION_LENGTH] / f"{key}{_SUFFIX}"
    return _Remote(address, target, pack is not None)


def _version_of(shards: list[RemotePath]) -> str:
    try:
        stamps = [open_input(shard).stamp for shard in shards]
    except FileNotFoundError:
        raise SourceError("no such model", path=shards[0]) from None
    except OSError as error:
        raise open_failure(error, shards[0]) from None
    return f"{digest.xxh3(repr(stamps).encode()):016x}"


def _fetch(
    source: _Remote,
    cache: Path,
    planned: Callable[[FetchPlan], None] | None,
    progress: Progress | None,
) -> None:
    address, target, is_pack = source

    def announce(length: int) -> None:
        if planned is not None:
            planned(FetchPlan(address, str(target), length, str(cache), length_on_disk(cache)))

    target.parent.mkdir(parents=True, exist_ok=True)
    with _advising_the_same_command():
        if is_pack:
            pull(address, target, planned=lambda plan: announce(plan.all_length), progress=progress)
        else:
            pack_model(
                address,
                target,
                resume=target.exists(),
                planned=lambda summary: announce(summary.data_length),
                progress=progress,
            )


@contextlib.contextmanager
def _advising_the_same_command() -> Iterator[None]:
    """Replace the hints of `pack_model` and `pull`, which name other commands to resume with."""
    try:
        yield
    except MoepackError as error:
        hint = error.hint
        if isinstance(error, MachineError) and error.problem in _FULL:
            hint = _NO_SPACE
        elif hint is not None and ("resume" in hint or _GO_ON in hint):
            hint = None
        error.hint = _GO_ON if hint is None else f"{hint}; then {_GO_ON}"
        raise
    except KeyboardInterrupt as stop:
        stop.__notes__ = [_GO_ON]
        raise


def _is_named(inner: str, key: str, *, is_on_hub: bool) -> bool:
    """Return whether an address with `inner`, on the hub a quantisation, names the model `key`."""
    name = inner.removesuffix(_SUFFIX)
    if match := SHARD_NAME.match(name):
        name = match["prefix"]
    name = name.removesuffix(".gguf")
    if not name or key == name or key.startswith(f"{name}/"):
        return True
    words = key.lower().split("/") if is_on_hub else []
    return any(word == name.lower() or word.endswith(f"-{name.lower()}") for word in words)
