"""Functions of the C library that Python does not offer."""

import ctypes
import os
from collections.abc import Callable
from typing import Any

from moepack.common.paths import AnyPath

LIBRARY = ctypes.CDLL(None, use_errno=True)


def function(name: str, *argument_types: Any) -> Callable[..., int] | None:
    """Return a function of the C library that returns an int; None if this system lacks it."""
    try:
        c_function = LIBRARY[name]
    except AttributeError:
        return None
    c_function.argtypes = argument_types
    return c_function


def last_error() -> OSError:
    """Return the error that the last call of this thread has set in `errno`."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def sync_file_system(folder: AnyPath) -> None:
    """Make all files of the file system of `folder` survive a loss of power (syncfs(2)).

    For many small ones it takes one commit of the journal, not one each. Raises OSError.
    """
    sync = function("syncfs", ctypes.c_int)
    if sync is None:
        os.sync()
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if sync(descriptor):
            raise last_error()
    finally:
        os.close(descriptor)
