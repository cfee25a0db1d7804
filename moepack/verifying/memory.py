"""Comparing memory at the speed of the C library, without holding up other threads."""

import ctypes

_libc = ctypes.CDLL(None)
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Memory:
    """Bytes in memory: `view` of them, which keeps them there, and the `address` of the first."""

    def __init__(self, view: memoryview, address: int) -> None:
        self.view = view
        self._address = address

    def first_difference(self, other: "Memory", length: int) -> int | None:
        """Return the number of the first byte of `length` that differs; None where none does."""
        if not _memcmp(self._address, other._address, length):
            return None
        pairs = zip(self.view[:length], other.view[:length], strict=True)
        return next(number for number, (ours, theirs) in enumerate(pairs) if ours != theirs)


class Buffer(Memory):
    """Memory of `length` bytes: `view` is for filling it, with zeros at first."""

    def __init__(self, length: int) -> None:
        memory = bytearray(length)
        self._array = (ctypes.c_char * length).from_buffer(memory)
        super().__init__(memoryview(memory), ctypes.addressof(self._array))
