"""Paths as callers name them: one, or several."""

import os
from collections.abc import Sequence

from moepack.errors import RequestError

AnyPath = str | os.PathLike[str]
PathOrPaths = AnyPath | Sequence[AnyPath]


def listed(named: PathOrPaths) -> list[AnyPath]:
    """Return what was named as a list, also where it is one path.

    Raises RequestError for what is neither: a generator can be gone through only once.
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
    """Return as `listed` does, as texts; with `argument` none at all is a RequestError as well."""
    texts = [os.fspath(path) for path in listed(named)]
    if argument is not None and not texts:
        raise RequestError("no file is named", argument=argument)
    return texts


def _no_path(found: object) -> RequestError:
    expected = "a path, or a list or tuple of paths"
    return RequestError("not a path", expected=expected, found=type(found).__name__)
