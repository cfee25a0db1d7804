"""Memory to read into: page-aligned, and where wanted of a fixed size and used again."""

import contextlib
import mmap
import threading
from typing import Any

from moepack.errors import MachineError, RequestError
from moepack.sizes import align

_HUGE_PAGE = 2 << 20


def allocate(length: int, start: int = 0) -> memoryview:
    """Return `length` bytes of new memory that begins `start` bytes behind the start of a page.

    An anonymous mapping: it starts on a page, which direct I/O and copies to a GPU need, and is
    given back to the system with the last view of it. Raises MachineError where there is no memory.
    """
    try:
        return map_memory(start + length)[start:]
    except (OSError, OverflowError, ValueError) as error:
        raise MachineError(f"cannot allocate {length} bytes ({error})") from None


def map_memory(length: int) -> memoryview:
    """Return new memory that begins on a page; raise OSError where there is none."""
    # Private: Python's default is memory to share with children, which never has huge pages.
    return memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def writable_bytes(buffer: Any, length: int) -> memoryview:
    """Return the first `length` bytes of a caller's buffer as a view.

    `buffer` is anything with a contiguous, writable buffer: bytearray, mmap, a numpy array, pinned
    memory. Raises RequestError for one that is something else, or too small.
    """
    try:
        whole = memoryview(buffer)
        if "O" in whole.format:
            raise RequestError("a buffer of Python's own objects is nothing to read into")
        view = whole.cast("B")
    except (TypeError, ValueError) as error:
        raise RequestError(f"not a contiguous buffer ({error})") from None
    if view.readonly or len(view) < length:
        found = "a read-only one" if view.readonly else f"{len(view)} bytes"
        expected = f"{length} writable bytes"
        raise RequestError("the buffer does not fit", expected=expected, found=found)
    return view[:length]


class BufferPool:
    """`count` buffers of `length` bytes each, in one mapping that is made once.

    Buffers start on a page. The system is asked for huge pages, which make reading into them and
    copying out of them cheaper. With `register` a reader's `uring` backend has the kernel pin all
    of it once, instead of some of it for each read; other backends ignore that. A pool may be used
    from several threads and by several readers.
    """

    def __init__(self, count: int, length: int, *, register: bool = False) -> None:
        if count < 1 or length < 1:
            raise RequestError(
                "not a pool", expected="at least 1 buffer of 1 byte", found=(count, length)
            )
        self.count, self.length = count, length
        stride = align(length, mmap.PAGESIZE)
        memory = allocate(count * stride)
        self.fixed = memory if register else None
        _ask_for_huge_pages(memory)
        self._free = [memory[n * stride :][:length] for n in reversed(range(count))]
        self._taken: dict[int, tuple[memoryview, memoryview]] = {}
        # A finaliser of the caller's may give a buffer back, wherever the interpreter runs it.
        self._lock = threading.RLock()

    @property
    def free_count(self) -> int:
        """How many buffers are free."""
        return len(self._free)

    def take(self, length: int) -> memoryview | None:
        """Return the first `length` bytes of a free buffer, None where all are taken."""
        with self._lock:
            if not self._free:
                return None
            buffer = self._free.pop()
            view = buffer[:length]
            self._taken[id(view)] = (view, buffer)
            return view

    def give_back(self, view: memoryview) -> None:
        """Make a buffer free again; its views must not be used after that.

        Raises RequestError for one that was not taken from this pool, or given back before.
        """
        with self._lock:
            taken, buffer = self._taken.pop(id(view), (None, None))
            if taken is not view or buffer is None:
                raise RequestError("the buffer was not taken from this pool")
            self._free.append(buffer)


def _ask_for_huge_pages(memory: memoryview) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or not isinstance(memory.obj, mmap.mmap) or len(memory) < _HUGE_PAGE:
        return
    with contextlib.suppress(OSError):  # the kernel was built without them
        memory.obj.madvise(advice)
