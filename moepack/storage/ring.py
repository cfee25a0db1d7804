"""An io_uring by its raw system calls: entries in, completions out (Linux).

It knows rings, not files or experts. The numbers are those of the kernel's interface
(include/uapi/linux/io_uring.h, io_uring(7)); system calls from 424 on have the same number on every
architecture.

One thread at a time uses a ring. The kernel reads what is submitted inside of `enter`, in the same
thread, so that needs no barrier. Completions are written by whichever processor ends the read: they
may only be read after the ring's tail, see `_fence`.
"""

import ctypes
import errno
import mmap
import os
import struct
import threading
import time

from moepack.storage import libc

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_OFF_SQ_RING, _OFF_CQ_RING, _OFF_SQES = 0, 0x8000000, 0x10000000
_ENTER_GETEVENTS = 1
_REGISTER_BUFFERS, _REGISTER_EVENTFD = 0, 4

_FENCES = range(0 if os.uname().machine in ("x86_64", "i686") else 2)

READV, READ_FIXED, READ = 1, 4, 22
MAX_BUFFER_LENGTH = 1 << 30
"""Of one registered buffer (io_uring_register(2))."""

_PARAMS_LENGTH = 120
_SQ_OFFSETS_AT, _CQ_OFFSETS_AT = 40, 80
_SQE_LENGTH, _CQE_LENGTH = 64, 16
_SQE = struct.Struct("=BBHiQQIIQH22x")
"""opcode, flags, ioprio, fd, off, addr, len, rw_flags, user_data, buf_index; the rest is 0."""
_CQE = struct.Struct("=QiI")

_syscall = libc.LIBRARY["syscall"]
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] * 7


def _call(number: int, *arguments: int) -> int:
    """Do a system call of six arguments; raises OSError as Python's own do."""
    result: int = _syscall(number, *arguments)
    if result < 0:
        raise libc.last_error()
    return result


def _enter(descriptor: int, submit_count: int, wait_count: int) -> int:
    flags = _ENTER_GETEVENTS if wait_count else 0
    return _call(_ENTER, descriptor, submit_count, wait_count, flags, 0, 0)


class Ring:
    """A ring for up to `depth` requests in flight. Raises OSError if io_uring is not available.

    EPERM: a container or the system's settings forbid it; ENOSYS: the kernel has none; ENOMEM: old
    kernels count rings against the limit of locked memory.
    """

    def __init__(self, depth: int) -> None:
        params = ctypes.create_string_buffer(_PARAMS_LENGTH)
        self._descriptor = _call(_SETUP, depth, ctypes.addressof(params), 0, 0, 0, 0)
        self._maps: list[mmap.mmap] = []
        self._event_descriptor: int | None = None
        try:
            self._map(params.raw)
        except BaseException:
            self.close()
            raise
        self._barrier = threading.Lock()

    def _map(self, params: bytes) -> None:
        """Map the two rings and the entries, by the offsets in io_uring_params."""
        sq_entries, cq_entries = struct.unpack_from("=2I", params)
        sq_head, sq_tail, sq_mask, _, _, _, sq_array = struct.unpack_from(
            "=7I", params, _SQ_OFFSETS_AT
        )
        cq_head, cq_tail, cq_mask, _, _, cqes = struct.unpack_from("=6I", params, _CQ_OFFSETS_AT)
        # Since Linux 5.4 one mapping would do; two do on every kernel.
        sq_map = self._map_at(_OFF_SQ_RING, sq_array + 4 * sq_entries)
        cq_map = self._map_at(_OFF_CQ_RING, cqes + _CQE_LENGTH * cq_entries)
        self._entries = self._map_at(_OFF_SQES, _SQE_LENGTH * sq_entries)
        self._depth = sq_entries
        # Words, not bytes: one store has to change a whole number.
        self._sq, self._cq = memoryview(sq_map).cast("I"), memoryview(cq_map).cast("I")
        self._sq_head, self._sq_tail = sq_head // 4, sq_tail // 4
        self._sq_mask = self._sq[sq_mask // 4]
        self._cq_head, self._cq_tail = cq_head // 4, cq_tail // 4
        self._cq_mask = self._cq[cq_mask // 4]
        self._cqes, self._cqes_at = cq_map, cqes
        for number in range(sq_entries):
            self._sq[sq_array // 4 + number] = number

    def _map_at(self, offset: int, length: int) -> mmap.mmap:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        area = mmap.mmap(self._descriptor, length, flags=flags, offset=offset)
        self._maps.append(area)
        return area

    # Both are counted from the rings themselves: a signal's handler may raise anywhere between two
    # instructions, and what the kernel has taken must not be taken for something else.

    @property
    def in_flight(self) -> int:
        """Number of requests that were prepared and not yet taken back: each has one completion."""
        return _distance(self._cq[self._cq_head], self._sq[self._sq_tail])

    @property
    def _unsubmitted(self) -> int:
        return _distance(self._sq[self._sq_head], self._sq[self._sq_tail])

    def prepare(
        self, code: int, descriptor: int, offset: int, address: int, length: int, user_data: int,
        buffer_number: int = 0,
    ) -> None:  # fmt: skip
        """Queue one request, to be submitted by the next `enter`; its completion bears `user_data`.

        READ fills `length` bytes at `address`, READV the `length` pieces of the iovec array there,
        READ_FIXED is READ inside of registered buffer `buffer_number`.
        """
        sq = self._sq
        tail = sq[self._sq_tail]
        # One completion fits for each entry, so completions cannot overflow.
        in_flight = _distance(self._cq[self._cq_head], tail)
        assert in_flight < self._depth, "more requests than the ring has room for"
        _SQE.pack_into(
            self._entries, (tail & self._sq_mask) * _SQE_LENGTH,
            code, 0, 0, descriptor, offset, address, length, 0, user_data, buffer_number,
        )  # fmt: skip
        sq[self._sq_tail] = (tail + 1) & 0xFFFFFFFF

    def submit(self) -> None:
        """Hand the prepared requests to the kernel, and wait for no completion."""
        count = self._unsubmitted
        while count and self._enter(count, 0) < count:
            count = self._unsubmitted

    def completions(self, *, wait: bool) -> list[tuple[int, int]]:
        """Return (user data, result) of the requests that have ended: bytes, or an errno below 0.

        With `wait`, and if requests are in flight, there is at least one.
        """
        completions = self._take()
        while wait and not completions and self.in_flight:
            self._enter(self._unsubmitted, 1)
            completions = self._take()
        return completions

    def _enter(self, submit_count: int, wait_count: int) -> int:
        """Submit, and wait for completions until a signal comes; return how many were submitted."""
        try:
            return _enter(self._descriptor, submit_count, wait_count)
        except InterruptedError:
            pass  # Python runs the signal's handler between here and the next try
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY):
                raise
            time.sleep(0.001)  # the kernel is short of memory for a moment
        return 0

    def _take(self) -> list[tuple[int, int]]:
        head, tail = self._cq[self._cq_head], self._cq[self._cq_tail]
        if head == tail:
            return []
        self._fence()
        completions = []
        while head != tail:
            at = self._cqes_at + (head & self._cq_mask) * _CQE_LENGTH
            user_data, result, _ = _CQE.unpack_from(self._cqes, at)
            completions.append((user_data, result))
            head = (head + 1) & 0xFFFFFFFF
        self._fence()
        self._cq[self._cq_head] = head
        return completions

    def _fence(self) -> None:
        """Keep processors from moving a load or store across this point.

        Python has no fence, but a lock's release followed by its acquisition is one. x86 needs
        none here, ARM and RISC-V do.
        """
        for _ in _FENCES:
            with self._barrier:
                pass

    def register(self, address: int, length: int) -> None:
        """Register memory for READ_FIXED, as buffers of MAX_BUFFER_LENGTH, numbered from 0.

        Raises OSError: ENOMEM if it exceeds the limit of locked memory.
        """
        iovecs = b"".join(
            struct.pack("=QQ", start, min(MAX_BUFFER_LENGTH, address + length - start))
            for start in range(address, address + length, MAX_BUFFER_LENGTH)
        )
        self._register(_REGISTER_BUFFERS, iovecs, len(iovecs) // 16)

    def event_descriptor(self) -> int:
        """Return an eventfd that counts completions from now on."""
        if self._event_descriptor is None:
            self._event_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._register(_REGISTER_EVENTFD, struct.pack("=i", self._event_descriptor), 1)
        return self._event_descriptor

    def _register(self, code: int, data: bytes, count: int) -> None:
        array = ctypes.create_string_buffer(data, len(data))
        _call(_REGISTER, self._descriptor, code, ctypes.addressof(array), count, 0, 0)

    def close(self) -> None:
        """Unmap and close the ring. Nothing may be in flight: the kernel would still write."""
        for name in ("_sq", "_cq"):
            if hasattr(self, name):
                getattr(self, name).release()
        for area in self._maps:
            area.close()
        self._maps.clear()
        os.close(self._descriptor)
        if self._event_descriptor is not None:
            os.close(self._event_descriptor)


def _distance(start: int, end: int) -> int:
    """Return the number of entries from `start` to `end`, positions that wrap at 2**32."""
    return (end - start) & 0xFFFFFFFF
