"""Memory to read into: new, page-aligned, or a caller's."""

import contextlib
import mmap
from typing import Any

from moepack.common.errors import MachineError, RequestError

# Python's default is memory to share with children, which never has huge pages.
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_TENSOR_HINT = "tensor.view(torch.uint8).numpy() is the memory of a contiguous tensor on the CPU"


def allocate(length: int) -> memoryview:
    """Return `length` bytes of new memory that begins on a page.

    An anonymous mapping, given back to the system with the last view of it. Raises MachineError if
    there is no memory.
    """
    return memoryview(_map(length))


def allocate_huge(length: int) -> mmap.mmap:
    """Return new memory in huge pages, if the system has them; raises MachineError for none.

    They make reading into it and copying out of it cheaper.
    """
    mapping = _map(length)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # the kernel was built without them
            mapping.madvise(advice)
    return mapping


def map_memory(length: int) -> memoryview:
    """Return new memory that begins on a page; raises OSError if there is none."""
    return memoryview(mmap.mmap(-1, length, flags=_PRIVATE))


def _map(length: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, length, flags=_PRIVATE)
    except (OSError, OverflowError, ValueError) as error:
        raise MachineError(f"cannot allocate {length:,} bytes ({error})") from None


def writable_bytes(buffer: Any, length: int) -> memoryview:
    """Return the first `length` bytes of a caller's buffer as a view.

    `buffer` is anything with a contiguous, writable buffer: bytearray, mmap, a numpy array. Raises
    RequestError for one that is something else, or too small.
    """
    try:
        whole = memoryview(buffer)
        if "O" in whole.format:
            raise RequestError("cannot read into a buffer of Python objects")
        view = whole.cast("B")
    except (TypeError, ValueError) as error:
        # Not called for the caller: some libraries' `numpy()` makes a copy, which nobody would see.
        hint = _TENSOR_HINT if hasattr(buffer, "numpy") else None
        raise RequestError(f"not a contiguous buffer ({error})", hint=hint) from None
    if view.readonly or len(view) < length:
        actual = "a read-only one" if view.readonly else f"{len(view):,} bytes"
        expected = f"{length:,} writable bytes"
        raise RequestError("the buffer does not fit", expected=expected, found=actual)
    return view[:length]
