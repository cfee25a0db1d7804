"""Models on this machine: fetched ones, and the files that runs keep of any.

There is no list of it: the user's folders of moepack, and the hub's own cache, are looked through.
Files of another origin in moepack's folders are never removed.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from moepack.common.errors import MachineError, MoepackError, RequestError, write_failure
from moepack.common.paths import is_remote
from moepack.pack.format import manifest
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.copies import linked_folder
from moepack.pack.reading.directory import read_any_manifest
from moepack.packing.copies.mirror import remove_mirror
from moepack.packing.fetched import (
    FetchedModel,
    fetched_models,
    is_open,
    length_on_disk,
    remove_fetched,
)
from moepack.running.programs.compiling import SOURCES
from moepack.running.serving.prompt_cache import model_id, weights_id
from moepack.running.serving.prompt_files import remove_prompts, stored_prompts
from moepack.storage.folders import user_folder
from moepack.storage.remote import hub
from moepack.traces.hotness.learned import LearnedFile, learned_files, learned_path, remove_learned

KINDS = ("mirror", "model", "learned", "prompts", "index", "library")
"""The kinds of removable files, in the order of their removal."""
HUB = "hub"
"""The kind of shards in the hub's own cache, which are not moepack's to remove."""
_FILES = {
    "index": re.compile(r"index-[0-9a-f]{16}\.bin"),
    "library": re.compile(rf"(?:{'|'.join(SOURCES)})-[0-9a-f]+-\w+-[0-9a-f]+\.so"),
}
"""The names of the files in the cache itself, by kind."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Files of one kind, of the model `name`.

    `name` is the address of a fetched model, else the model's own name, or an id. `version` and
    `model_path` are those of a fetched model. `length` is bytes on the drive, `last_used` a time as
    ISO 8601. `problem` is null for whole files.
    """

    name: str
    kind: str
    path: str
    length: int
    last_used: str | None
    version: str | None = None
    model_path: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """Stored files, and their length, in which the hub's own cache is not counted."""

    items: list[StoredItem]
    length: int


def stored() -> StoredFacts:
    """Return the files of models on this machine. Reads nothing of models but manifests."""
    items: list[StoredItem] = []
    owners: dict[str, FetchedModel] = {}
    for model in fetched_models():
        items += _fetched(model, owners)
    items += [*_kept(owners), *_in_cache(), *_in_hub()]
    items.sort(key=lambda item: (item.name, item.version or "", item.kind != "model", item.kind))
    return sum_of(items)


def sum_of(items: list[StoredItem]) -> StoredFacts:
    """Return items with their length."""
    return StoredFacts(items, sum(item.length for item in items if item.kind != HUB))


def _fetched(model: FetchedModel, owners: dict[str, FetchedModel]) -> Iterator[StoredItem]:
    """Yield a fetched model and its mirror; enter it as the owner of its counts."""
    problem = None
    try:
        path, data, _ = read_any_manifest(model.path)
        owners[weights_id(data)] = model
        owners[learned_path(manifest.decode(data, str(path))).name] = model
    except MoepackError as error:
        problem = error.problem
    yield _of_fetched(model, _item("", "model", model.path, problem))
    mirror = linked_folder(model.path)
    if mirror is not None:
        problem = None if mirror.is_dir() else "its drive is not there"
        yield _of_fetched(model, _item("", "mirror", mirror, problem))


def _kept(owners: Mapping[str, FetchedModel]) -> Iterator[StoredItem]:
    """Yield the files that runs keep of models: counts, and the states of texts."""
    files: list[LearnedFile] = []
    with contextlib.suppress(MachineError):  # without a folder there are none
        files = learned_files()
    rows = [(path, "learned", model, is_whole) for path, model, is_whole in files]
    rows += [(folder, "prompts", None, True) for folder in sorted(stored_prompts())]
    for path, kind, model, is_whole in rows:
        item = _item(
            model or path.name.partition(".")[0], kind, path, None if is_whole else "not whole"
        )
        owner = owners.get(path.name)
        yield item if owner is None else _of_fetched(owner, item)


def _in_cache() -> Iterator[StoredItem]:
    cache = user_folder("XDG_CACHE_HOME", ".cache")
    for path in sorted(cache.iterdir()) if cache else ():
        for kind, name in _FILES.items():
            if name.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                yield _item(path.stem, kind, path)


def _in_hub() -> Iterator[StoredItem]:
    for name, folder, files in hub.cached_ggufs():
        length = sum(map(length_on_disk, files))
        used = _last_used(*files)
        yield StoredItem(f"hf://{name}", HUB, str(folder), length, used)


def _of_fetched(model: FetchedModel, item: StoredItem) -> StoredItem:
    return replace(item, name=model.address, version=model.version, model_path=str(model.path))


def _item(name: str, kind: str, path: Path, problem: str | None = None) -> StoredItem:
    return StoredItem(
        name, kind, str(path), length_on_disk(path), _last_used(path), problem=problem
    )


def _last_used(*paths: Path) -> str | None:
    """Return when one of these files, or one in these folders, was read or written last.

    Listing itself reads manifests and counts: of these it is when they were written.
    """
    seconds = []
    for file in (file for path in paths for file in (path, *path.rglob("*"))):
        with contextlib.suppress(OSError):
            status = file.lstat()
            is_read_here = file.name.endswith(("manifest.json", ".csv")) or file.is_dir()
            seconds.append(status.st_mtime if is_read_here else max(status[7:9]))
    return datetime.fromtimestamp(max(seconds), UTC).isoformat("T", "seconds") if seconds else None


def choose(
    items: Sequence[StoredItem], names: Sequence[str], kinds: Sequence[str] = ()
) -> list[StoredItem]:
    """Return the items of models by their names, addresses or paths; of all `kinds` by default.

    Without names they are those of all models. The path may be that of any model, whose own files
    are never chosen. Raises RequestError for an unknown kind, and if there is nothing, or only
    shards in the hub's own cache, and what opening a model raises.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise RequestError("no such kind", found=kind, expected=", ".join(KINDS))
    kinds = kinds or KINDS
    if not names:
        return [item for item in items if item.kind in kinds]
    chosen = [item for name in names for item in _of_name(items, name, kinds)]
    return list(dict.fromkeys(chosen))


def _of_name(items: Sequence[StoredItem], name: str, kinds: Sequence[str]) -> list[StoredItem]:
    places = {os.path.realpath(name)}
    if is_remote(name):
        places = {str(model.path) for model in fetched_models() if model.is_named(name)}
    elif os.path.lexists(name) and not any(item.path in places for item in items):
        with open_model(name) as pack:
            ids = {learned_path(pack.manifest).name, model_id(pack)}
        places |= {item.path for item in items if os.path.basename(item.path) in ids}
    of_name = [
        item
        for item in items
        if name == item.name
        or places & {item.path, item.model_path}
        or (item.kind == HUB and f"{name}/".startswith(f"{item.name}/"))
    ]
    chosen = [item for item in of_name if item.kind in kinds]
    if not chosen and of_name and of_name[0].kind == HUB:
        hint = f"hf cache rm model/{of_name[0].name.removeprefix('hf://')}"
        raise RequestError("in the hub's own cache", path=of_name[0].path, hint=hint)
    if not chosen:
        hint = "`moepack models` lists what is there"
        raise RequestError("nothing is stored of it", path=name, hint=hint)
    return chosen


def remove_stored(items: Iterable[StoredItem]) -> None:
    """Remove items. Raises RequestError for a model in use, before any is removed; MachineError."""
    items = sorted(items, key=lambda item: KINDS.index(item.kind))
    for item in items:
        if item.kind == "model" and is_open(Path(item.path)):
            raise RequestError("in use by another program", path=item.path, hint="end it first")
    for item in items:
        path = Path(item.path)
        if item.kind == "mirror":
            remove_mirror(item.model_path or "")
        elif item.kind == "model":
            remove_fetched(path)
        elif item.kind == "learned":
            remove_learned(path)
        elif item.kind == "prompts":
            remove_prompts(path)
        else:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise write_failure(error, path) from None
