"""The shards of a model that is elsewhere: on the hub, a web server, or in a store of objects."""

import re
from collections.abc import Iterable

from moepack.common.errors import MachineError, SourceError, remedy
from moepack.common.escaping import shell_word
from moepack.common.paths import RemotePath
from moepack.common.sizes import size_text
from moepack.source.folder import SHARD_NAME, SHOWN_MODELS, shard_names, with_list
from moepack.storage.remote import hub
from moepack.storage.remote.stores import resolve, store_of

_USUAL_TYPE = "Q4_K_M"
"""The quantisation that is meant by the name of a repository alone, as in llama.cpp and ollama."""
_NO_MODEL = re.compile(r"(?:^|/)(?:mmproj|imatrix)|imatrix[^/]*\.gguf\Z", re.IGNORECASE)


def find_remote_shards(address: str) -> list[RemotePath]:
    """Find the shards of the one model that an address names, in order.

    `hf://OWNER/NAME/INNER@REVISION` names a file, a folder or a quantisation, such as `Q4_K_M`; an
    address of another scheme a file, or (in a store of objects) a folder. Raises SourceError if
    there is no model or there are several, MachineError.
    """
    path = resolve(address)
    if path.store.startswith("hf:"):
        files = hub.repository(path.store).files
        return choose_on_hub(path, {name: stamp.length for name, stamp in files.items()})
    if path.suffix == ".gguf":
        return siblings(path)
    if path.store.startswith("http"):
        hint = "a web server has no list of files: name a shard, MODEL-00001-of-0000N.gguf"
        raise SourceError("not the address of a GGUF", path=address, hint=hint)
    try:
        lengths = {key: stamp.length for key, stamp in store_of(path).objects(path.key)}
    except OSError as error:
        problem = f"cannot list: {error.strerror}"
        raise MachineError(problem, path=address, hint=remedy(error)) from None
    return _one_model(path, lengths, lengths)


def siblings(path: RemotePath) -> list[RemotePath]:
    """Name all shards of the model that has `path` for one of its shards."""
    match = SHARD_NAME.match(path.name)
    if match is None:
        return [path]
    return [path.parent / name for name in shard_names(match["prefix"], int(match["count"]))]


def choose_on_hub(path: RemotePath, lengths: dict[str, int]) -> list[RemotePath]:
    """Name the shards of the one model that a path names among the files of its repository.

    `lengths` are those of all its files. Of several in the whole repository it is that of the usual
    quantisation. Raises SourceError for none, and for several others.
    """
    inner = path.key
    if inner in lengths:
        return siblings(path)
    in_folder = [name for name in lengths if not inner or name.startswith(f"{inner}/")]
    if not inner and len(_models_of(in_folder)) > 1:
        in_folder = list(filter(_tag(_USUAL_TYPE).search, in_folder)) or in_folder
    return _one_model(path, in_folder or filter(_tag(inner).search, lengths), lengths)


def _tag(inner: str) -> re.Pattern[str]:
    """Return the pattern of files whose names have a quantisation, or another word, in them."""
    return re.compile(rf"(?:^|[-_./]){re.escape(inner)}(?:$|[-_./])", re.IGNORECASE)


def _models_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each model among some files, in order."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not _NO_MODEL.search(name):
            match = SHARD_NAME.match(name)
            model = f"{match['prefix']}-{match['count']}" if match else name
            models.setdefault(model, []).append(name)
    return models


def _one_model(
    named: RemotePath, names: Iterable[str], lengths: dict[str, int]
) -> list[RemotePath]:
    """Return the shards of the one model among some files; the others are for the message."""
    models = _models_of(names)
    if not models:
        others = sorted(name for name in lengths if name.endswith(".gguf"))
        names = ", ".join(others[:SHOWN_MODELS]) or "no GGUF"
        raise SourceError("no such model here", path=named, found=names)
    if len(models) > 1:
        hint = "name one of them:"
        lines = [
            f"{shell_word(str(RemotePath(named.store) / files[0]))}"
            f"  {size_text(sum(lengths[file] for file in files))}"
            for files in models.values()
        ]
        raise with_list(SourceError(f"{len(models)} models here", path=named, hint=hint), lines)
    files = next(iter(models.values()))
    return siblings(RemotePath(named.store) / files[0])
