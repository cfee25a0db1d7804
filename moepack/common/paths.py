"""Paths as callers name them: one, or several."""

import os
from collections.abc import Sequence

from moepack.common.errors import RequestError

AnyPath = str | os.PathLike[str]
PathOrPaths = AnyPath | Sequence[AnyPath]


def path_list(named: PathOrPaths) -> list[AnyPath]:
    """Return one path or several as a list.

    Raises RequestError for anything else: a generator can be gone through only once.
    """
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
