"""Paths as callers name them, one or several, and addresses of files that are elsewhere.

Addresses are `hf://`, `https://`, `s3://`, `gs://` and `az://`.
"""

import os
import re
from collections.abc import Sequence
from pathlib import PosixPath

from moepack.common.errors import RequestError

AnyPath = str | os.PathLike[str]
PathOrPaths = AnyPath | Sequence[AnyPath]
_ADDRESS = re.compile(r"(?:hf|https?|s3|gs|az)://", re.IGNORECASE)


def path_list(named: PathOrPaths) -> list[AnyPath]:
    """Return one path or several as a list; raises RequestError for all else, generators too."""
    if isinstance(named, str | os.PathLike):
        return [named]
    if not isinstance(named, Sequence) or isinstance(named, bytes | bytearray | memoryview):
        raise _no_path(named)
    for path in named:
        if not isinstance(path, str | os.PathLike):
            raise _no_path(path)
    return list(named)


def path_texts(named: PathOrPaths, argument: str | None = None) -> list[str]:
    """Return as `path_list` does, as texts; with `argument` an empty list is an error as well."""
    texts = [os.fspath(path) for path in path_list(named)]
    if argument is not None and not texts:
        raise RequestError("no file is named", argument=argument)
    return texts


def _no_path(value: object) -> RequestError:
    expected = "a path, or a list or tuple of paths"
    return RequestError("not a path", expected=expected, found=type(value).__name__)


class RemotePath(PosixPath):
    """A path in a store: its parts are those of an address, and so is its text.

    The root of the store is the scheme with the host or bucket; of the hub, `hf://OWNER/NAME@COMMIT`.
    To this machine it is the path of a missing file; `storage.input_file` opens it.
    """

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    @property
    def store(self) -> str:
        """The address of the store."""
        return str(RemotePath(*self.parts[: self._root_count]))

    @property
    def key(self) -> str:
        """The name in the store, without a slash at either end."""
        return "/".join(self.parts[self._root_count :])

    @property
    def _root_count(self) -> int:
        return 3 if self.parts[0] == "hf:" else 2


def is_remote(name: AnyPath) -> bool:
    """Return whether a name is an address, not a path on this machine."""
    return bool(_ADDRESS.match(os.fspath(name)))


def parse_address(address: AnyPath) -> RemotePath:
    """Read an address, of the hub `hf://OWNER/NAME@COMMIT/KEY`; ValueError has the problem."""
    scheme, _, rest = os.fspath(address).partition("://")
    scheme = scheme.lower()
    root = rest.split("/")[: 2 if scheme == "hf" else 1]
    if not all(root) or len(root) < 1 + (scheme == "hf"):
        raise ValueError("an address without a host, a bucket or a repository")
    if scheme != "hf" and "@" in root[0]:
        raise ValueError("an address with a user or a password in it")
    if not rest.isprintable():
        raise ValueError("an address with a character in it that cannot be printed")
    if ".." in rest.split("/"):
        raise ValueError("an address with .. in it")
    if "?" in rest or "#" in rest:
        raise ValueError("an address with a query: signed ones expire")
    return RemotePath(f"{scheme}://{rest}")


def as_remote(path: AnyPath) -> RemotePath | None:
    """Return a path as an address, None if it is one of this machine. Raises as `parse_address`."""
    if isinstance(path, RemotePath):
        return path
    return parse_address(path) if is_remote(path) else None
