"""Functions of the C library that Python does not offer."""

import ctypes
import os
from collections.abc import Callable
from typing import Any

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
