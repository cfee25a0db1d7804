"""A pack's directory: its manifest and its index, and hints for paths of anything else.

Opens these two files and no other. A link to a file is as good as the file, since caches of hubs
consist of links; anything but a regular file is refused before it is read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.common import digest
from moepack.common.errors import (
    SHORTAGE_HINTS,
    ErrorCode,
    MachineError,
    MoepackError,
    PackError,
    open_failure,
    remedy,
)
from moepack.common.escaping import shell_word
from moepack.common.pack_files import (
    IN_PLACE_NAME,
    JOURNAL_NAME,
    PARTIAL_NAME,
    RECORDS_NAME,
    is_in_pack,
)
from moepack.common.path_hints import missing_hint
from moepack.common.paths import AnyPath, PathOrPaths, RemotePath, is_remote, path_list
from moepack.pack.format import manifest, records
from moepack.storage.input_file import open_input
from moepack.storage.regular_file import NotRegularError, map_file, open_regular, read_back

if TYPE_CHECKING:
    from moepack.pack.reading.copies import Partial

_SUFFIX, _MAGIC = ".gguf", b"GGUF"
_SHARDS = (f"*{_SUFFIX}", f"*/*{_SUFFIX}", f"snapshots/*/*{_SUFFIX}", f"snapshots/*/*/*{_SUFFIX}")
"""The shards of a model in a folder: in itself, one level down, or as in the hub's cache."""
_HINT = "a pack is the directory that `moepack pack` made"


def pack_folder(path: AnyPath) -> Path:
    """Return the path of a directory, or of a folder in a store."""
    if not is_remote(path):
        return Path(path)
    from moepack.storage.remote.stores import resolve  # here, since few packs are remote

    return resolve(path)


def named_pack(named: PathOrPaths) -> Path | None:
    """Return the named directory if it has a file that only packs have, else None."""
    names = path_list(named)
    if len(names) == 1 and is_remote(names[0]):
        return _remote_pack(names[0])
    paths = [Path(path) for path in names]
    if len(paths) != 1:
        return None
    unfinished = (JOURNAL_NAME, RECORDS_NAME, IN_PLACE_NAME, PARTIAL_NAME)
    marks = (manifest.NAME, manifest.INDEX_NAME, *unfinished)
    return paths[0] if any((paths[0] / mark).exists() for mark in marks) else None


def _remote_pack(address: AnyPath) -> Path | None:
    if _names_gguf(address):
        return None
    path = pack_folder(address)
    try:
        open_input(path / manifest.NAME).close()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise open_failure(error, path / manifest.NAME) from None
    return path


def _names_gguf(address: AnyPath) -> bool:
    return os.fspath(address).partition("?")[0].endswith(_SUFFIX)


def pack_path(named: PathOrPaths) -> Path | None:
    """Return the path that is to be opened as a pack; None if GGUFs are named.

    These are several paths, a file that is a GGUF or is called one, and a folder with any.
    """
    names = path_list(named)
    if len(names) != 1:
        return None
    if is_remote(names[0]):
        return None if _names_gguf(names[0]) else pack_folder(names[0])
    path = Path(names[0])
    if named_pack(path) is not None:
        return path
    if path.is_dir():
        shards = (shard for pattern in _SHARDS for shard in path.glob(pattern))
        return None if any(not _is_link_of_index(shard) for shard in shards) else path
    return None if path.suffix == _SUFFIX or _is_gguf(path) else path


def _is_link_of_index(path: Path) -> bool:
    """Return whether this is a link that a killed `index_model` has left."""
    return path.name.startswith("shard-") and path.is_symlink()


def _is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_manifest(path: Path) -> bytes:
    """Return the bytes of manifest.json of the pack at `path`, at most one more than are allowed.

    Raises PackError if there is none, with a hint for that directory, and MachineError.
    """
    name = path / manifest.NAME
    if isinstance(path, RemotePath):
        from moepack.storage.remote.stores import store_of  # here, since few packs are remote

        try:
            return store_of(path).read(f"{path.key}/{manifest.NAME}", manifest.MAX_LENGTH)
        except FileNotFoundError:
            hint = (
                f"if it is a model, make one: moepack pack {shell_word(str(path))} -o NAME.moepack"
            )
            raise PackError("no pack here: no manifest.json", path=path, hint=hint) from None
        except OSError as error:
            raise _problem(name, error) from None
    try:
        return read_back(name, manifest.MAX_LENGTH)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_a_pack(path) from None
    except OSError as error:
        raise _problem(name, error) from None


def read_any_manifest(path: Path) -> tuple[Path, bytes, Partial | None]:
    """Return path and bytes of the manifest of a pack, or of a partial one, and the latter.

    Raises as `read_manifest`, and PackError for a partial pack whose record is damaged.
    """
    try:
        return path / manifest.NAME, read_manifest(path), None
    except PackError:
        if not (path / PARTIAL_NAME).exists():
            raise
    from moepack.pack.reading.copies import PARTIAL_MANIFEST, open_partial  # here, since few are

    partial = open_partial(path)
    return path / PARTIAL_MANIFEST, partial.manifest_bytes, partial


def is_replaced(folder: Path, manifest_bytes: bytes) -> bool:
    """Return whether a pack has another manifest by now. Raises as `read_any_manifest`.

    If so, its index may be another as well, and that of the old manifest gone: a new ranking
    replaces both while others open the pack.
    """
    return read_any_manifest(folder)[1] != manifest_bytes


def map_index(folder: Path, entry: manifest.IndexEntry) -> mmap.mmap | bytes:
    """Map the index of a pack into memory, or else read it. Raises as `read_manifest`."""
    name = folder / entry.name
    try:
        if isinstance(name, RemotePath):
            return _fetch_index(name, entry)
        with open(name, "rb", opener=open_regular) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return map_file(file.fileno()) or file.read()
    except FileNotFoundError:
        raise PackError("the index is missing", path=name) from None
    except OSError as error:
        raise _problem(name, error) from None


def _fetch_index(path: RemotePath, entry: manifest.IndexEntry) -> bytes:
    """Return the index at `path`; from the user's cache if it is there with its digest.

    What comes from the store is returned as it is, right or wrong. Raises OSError.
    """
    # Here, since few packs are remote.
    from moepack.storage.atomic import write_whole
    from moepack.storage.folders import is_ours, user_folder
    from moepack.storage.remote.stores import store_of

    folder = user_folder("XDG_CACHE_HOME", ".cache")
    cached = None if folder is None else folder / f"index-{entry.digest:016x}.bin"
    if cached is not None:
        with contextlib.suppress(OSError):
            if is_ours(cached) and _is_right(data := read_back(cached, entry.length), entry):
                return data
    data = store_of(path).read(path.key, entry.length)
    if cached is not None and _is_right(data, entry):
        with contextlib.suppress(OSError, MoepackError):
            write_whole(cached, data)
    return data


def _is_right(data: bytes, entry: manifest.IndexEntry) -> bool:
    end = entry.length - records.TRAILER.size
    has_digest = data[end:] == records.TRAILER.pack(entry.digest)
    return has_digest and digest.xxh3(memoryview(data)[:end]) == entry.digest


def _not_a_pack(path: Path) -> PackError:
    problem, hint = "not a pack: no manifest.json", _HINT
    if not path.exists():
        problem, hint = "no such pack", missing_hint(path) or _HINT
    elif not path.is_dir():
        is_gguf = _is_gguf(path)
        problem = "a GGUF, not a pack" if is_gguf else "not a pack: not a directory"
        if is_in_pack(path):
            hint = f"name the pack: {shell_word(str(path.parent))}"
        elif is_gguf:
            stem = shell_word(re.sub(r"(-\d{5}-of-\d{5})?\.gguf\Z", "", path.name))
            hint = f"make a pack of it: moepack pack {shell_word(str(path))} -o {stem}.moepack"
    elif (path / IN_PLACE_NAME).exists():
        problem = "not a whole pack: no manifest.json"
        hint = (
            "it is made in place: go on with `moepack pack --in-place --resume`, or back with"
            " `moepack restore`; do not remove it, it holds the model"
        )
    elif (path / PARTIAL_NAME).exists():
        problem = "not a whole pack: a part of it is elsewhere"
        hint = f"bring the rest: `moepack pull --resume -o {shell_word(str(path))}`"
    elif (path / JOURNAL_NAME).exists():
        problem = "not a whole pack: no manifest.json"
        hint = "it was interrupted: `moepack pack … --resume` goes on with it"
    elif (path / RECORDS_NAME).exists():
        problem = "not a whole pack: no manifest.json"
        hint = "parts of it are written: `moepack pack … --commit` makes a pack once all are"
    return PackError(problem, path=path, hint=hint)


def _problem(path: Path, error: OSError) -> MoepackError:
    if isinstance(error, NotRegularError):
        return PackError(
            "not a regular file",
            path=path,
            place="kind of file",
            found=error.kind,
            code=ErrorCode.NOT_REGULAR,
        )
    hint = SHORTAGE_HINTS.get(error.errno or 0) or remedy(error)
    return MachineError(f"cannot read: {error.strerror}", path=path, hint=hint)
