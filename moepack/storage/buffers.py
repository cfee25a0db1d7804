"""Memory to read into: page-aligned, new or from a pool of buffers of one size."""

import contextlib
import mmap
import threading
from typing import Any

from moepack.common.errors import MachineError, RequestError
from moepack.common.sizes import align

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


class BufferPool:
    """`count` reusable buffers of `length` bytes each, in one mapping.

    Buffers start on a page, in huge pages if the system has them. A pool may be used from several
    threads and by several readers.
    """

    def __init__(self, count: int, length: int) -> None:
        if count < 1 or length < 1:
            expected = "at least 1 buffer of 1 byte"
            raise RequestError("not a pool", expected=expected, found=(count, length))
        self.count, self.length = count, length
        stride = align(length, mmap.PAGESIZE)
        memory = memoryview(allocate_huge(count * stride))
        self._free = [memory[n * stride :][:length] for n in reversed(range(count))]
        self._in_use: dict[int, tuple[memoryview, memoryview]] = {}
        # A finaliser of the caller's may give a buffer back, wherever the interpreter runs it.
        self._lock = threading.RLock()

    @property
    def free_count(self) -> int:
        """Number of free buffers."""
        return len(self._free)

    def take(self, length: int) -> memoryview | None:
        """Return the first `length` bytes of a free buffer, None if all are in use."""
        with self._lock:
            if not self._free:
                return None
            buffer = self._free.pop()
            view = buffer[:length]
            self._in_use[id(view)] = (view, buffer)
            return view

    def give_back(self, view: memoryview) -> None:
        """Make a buffer free again; its views must not be used after that.

        Raises RequestError for one that was not taken from this pool, or given back before.
        """
        with self._lock:
            original, buffer = self._in_use.pop(id(view), (None, None))
            if original is not view or buffer is None:
                raise RequestError("the buffer was not taken from this pool")
            self._free.append(buffer)
