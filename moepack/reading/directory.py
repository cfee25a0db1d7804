"""A pack's directory: its manifest and its index, and what a directory is that is no pack.

Opens these two files and no other. A link to a file is as good as the file, since caches of hubs
consist of links; what is no regular file is refused before it is read.
"""

import mmap
import os
import re
from pathlib import Path

from moepack.errors import SHORTAGE_HINTS, MachineError, MoepackError, PackError
from moepack.escaping import shell_word
from moepack.format import manifest
from moepack.format.names import IN_PLACE_NAME, JOURNAL_NAME
from moepack.path_hints import missing_hint
from moepack.paths import PathOrPaths, listed
from moepack.storage.pack_files import is_in_pack
from moepack.storage.regular_file import NotRegularError, open_regular

_SUFFIX, _MAGIC = ".gguf", b"GGUF"
_SHARDS = (f"*{_SUFFIX}", f"*/*{_SUFFIX}", f"snapshots/*/*{_SUFFIX}", f"snapshots/*/*/*{_SUFFIX}")
"""Where a folder may have the shards of a model: in itself, one level down, as the hub's cache."""
_HINT = "a pack is the directory that `moepack pack` made"


def named_pack(named: PathOrPaths) -> Path | None:
    """Return the directory that is named, and has a file that only a pack has; None for others."""
    paths = [Path(path) for path in listed(named)]
    if len(paths) != 1:
        return None
    names = (manifest.NAME, manifest.INDEX_NAME, JOURNAL_NAME, IN_PLACE_NAME)
    return paths[0] if any((paths[0] / name).exists() for name in names) else None


def pack_path(named: PathOrPaths) -> Path | None:
    """Return the path that is to be opened as a pack; None where GGUFs are named.

    These are several paths, a file that is a GGUF or is called one, and a folder with any.
    """
    paths = [Path(path) for path in listed(named)]
    if len(paths) != 1:
        return None
    path = paths[0]
    if named_pack(path) is not None:
        return path
    if path.is_dir():
        shards = (shard for pattern in _SHARDS for shard in path.glob(pattern))
        return None if any(not _is_link_of_index(shard) for shard in shards) else path
    return None if path.suffix == _SUFFIX or _begins_as_gguf(path) else path


def _is_link_of_index(path: Path) -> bool:
    """Return whether this is what `index_model` makes first, and leaves where it is killed."""
    return path.name.startswith("shard-") and path.is_symlink()


def _begins_as_gguf(path: Path) -> bool:
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_manifest(path: Path) -> bytes:
    """Return the bytes of manifest.json of the pack at `path`, too many of one that is too long.

    Raises PackError where there is none, saying what the directory is, and MachineError.
    """
    name = path / manifest.NAME
    try:
        with open(name, "rb", opener=open_regular) as file:
            return file.read(manifest.MAX_LENGTH + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_a_pack(path) from None
    except OSError as error:
        raise _problem(name, error) from None


def map_index(name: Path) -> mmap.mmap | bytes:
    """Map the index at `name` into memory, read-only. Raises as `read_manifest`."""
    try:
        with open(name, "rb", opener=open_regular) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise PackError("the index is missing", path=name) from None
    except OSError as error:
        raise _problem(name, error) from None


def _not_a_pack(path: Path) -> PackError:
    if not path.is_dir():
        return PackError(_problem_of(path), path=path, hint=_hint_for(path))
    if (path / IN_PLACE_NAME).exists():
        hint = (
            "it is made in place: go on with `moepack pack --in-place --resume`, or back with"
            " `moepack restore`; do not remove it, it holds the model"
        )
        return PackError("not a whole pack: no manifest.json", path=path, hint=hint)
    if (path / JOURNAL_NAME).exists():
        hint = "it was interrupted: `moepack pack … --resume` goes on with it"
        return PackError("not a whole pack: no manifest.json", path=path, hint=hint)
    return PackError("not a pack: no manifest.json", path=path, hint=_HINT)


def _problem_of(path: Path) -> str:
    """Return what is wrong with a path that is no directory."""
    if not path.exists():
        return "no such pack"
    return "a GGUF, not a pack" if _is_gguf(path) else "not a pack: not a directory"


def _hint_for(path: Path) -> str:
    """Return what to do about a path that is no directory."""
    if not path.exists():
        return missing_hint(path) or _HINT
    if is_in_pack(path):
        return f"name the pack: {shell_word(str(path.parent))}"
    if not _is_gguf(path):
        return _HINT
    stem = shell_word(re.sub(r"(-\d{5}-of-\d{5})?\.gguf\Z", "", path.name))
    return f"make a pack of it: moepack pack {shell_word(str(path))} -o {stem}.moepack"


def _is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _problem(path: Path, error: OSError) -> MoepackError:
    if isinstance(error, NotRegularError):
        place = "kind of file"
        return PackError("not a regular file", path=path, place=place, found=error.kind)
    hint = SHORTAGE_HINTS.get(error.errno or 0)
    return MachineError(f"cannot read: {error.strerror}", path=path, hint=hint)
