"""Reads rounded outwards to what direct I/O asks for, without copying what need not be copied.

A request may begin and end anywhere. Only the blocks at its two ends go through memory of ours, and
what is between goes straight into the caller's buffer, as one vectored read:

    file     |....head|  whole blocks  |tail....|
    memory   ours      caller's buffer  ours

Where the caller's buffer is itself misaligned, all of it goes through ours. So it does where one
of several buffers is, or ends within a block.
"""

import ctypes
import os

from moepack.sizes import align
from moepack.storage.backend import Completion, ReadRequest, completed
from moepack.storage.buffers import map_memory
from moepack.storage.open_files import Alignment, OpenFiles

MAX_PIECES = 32
"""Of one vectored read; more buffers than these go through one of ours."""


class RoundedRead:
    """One request as the kernel gets it: read `pieces`, one after another, from `offset` on.

    `offset` counts from the start of the file. The caller adds what it got to `done`; `rest` is
    what is still to be read, and `finish` ends it.
    """

    __slots__ = (
        *("_buffers", "_copies", "_head", "_length", "_offset_alignment", "_pieces"),
        *("done", "offset"),
    )

    def __init__(self, request: ReadRequest, alignment: Alignment) -> None:
        buffers = (request.buffer, *request.more)
        self.done = 0
        self._buffers, self._length = buffers, request.length
        self._offset_alignment = alignment.offset
        self._head = head = request.offset % alignment.offset
        self.offset = request.offset - head
        self._copies: list[tuple[int, memoryview]] = []
        is_one_read = len(buffers) <= MAX_PIECES and not self._head
        if is_one_read and all(is_aligned(0, len(b), address(b), alignment) for b in buffers):
            self._pieces = list(buffers)
        elif request.more:
            self._pieces = [self._ours(0, align(self._head + self._length, alignment.offset))]
        else:
            self._pieces = self._rounded(request.buffer, alignment)

    def _rounded(self, buffer: memoryview, alignment: Alignment) -> list[memoryview]:
        block = alignment.offset
        first = -self._head % block
        last = first + (len(buffer) - first) // block * block
        if last <= first or not _fits(buffer[first:], alignment.memory):
            return [self._ours(0, align(self._head + len(buffer), block))]
        pieces = [buffer[first:last]]
        if first:
            pieces.insert(0, self._ours(0, block))
        if last < len(buffer):
            pieces.append(self._ours(last, block))
        return pieces

    def _ours(self, start: int, length: int) -> memoryview:
        """Return aligned memory whose bytes `finish` copies to `start` in the buffers."""
        memory = map_memory(length)
        self._copies.append((start, memory if start else memory[self._head :]))
        return memory

    @property
    def rest(self) -> list[memoryview]:
        """Return the pieces that are still to be read."""
        if not self.done:
            return self._pieces
        skipped = self.done
        rest = []
        for piece in self._pieces:
            if skipped < len(piece):
                rest.append(piece[skipped:])
            skipped = max(0, skipped - len(piece))
        return rest

    def advance(self, got: int) -> bool:
        """Count `got` bytes as read; say whether that was all there is.

        A read that stops off the grid has met the end of the file: to go on there would need a
        misaligned read, and there is nothing to get.
        """
        self.done += got
        length = sum(map(len, self._pieces))
        return not got or self.done >= length or bool(self.done % self._offset_alignment)

    def finish(self) -> int:
        """Copy the ends into the buffers; give how many of their bytes were read."""
        length = min(max(0, self.done - self._head), self._length)
        for start, memory in self._copies:
            self._put(start, memory[: max(0, length - start)])
        return length

    def _put(self, start: int, data: memoryview) -> None:
        """Copy `data` to `start` in the buffers, as if they were one."""
        for buffer in self._buffers:
            count = min(len(data), len(buffer) - start)
            if count > 0:
                buffer[start : start + count] = data[:count]
                data = data[count:]
            start = max(0, start - len(buffer))


def read(files: OpenFiles, number: int, request: ReadRequest) -> Completion:
    """Do one request with positioned reads in this thread."""
    try:
        path, offset, buffer, more = request
        file = files.get(path)
        if not more and is_aligned(offset, len(buffer), address(buffer), file.alignment):
            got = os.preadv(file.descriptor, [buffer], offset)
            if got == len(buffer):
                return completed(number, got)
        rounded = RoundedRead(request, file.alignment)
        while not rounded.advance(
            os.preadv(file.descriptor, rounded.rest, rounded.offset + rounded.done)
        ):
            pass
    except OSError as error:
        return Completion(number, 0, error)
    return Completion(number, rounded.finish(), None)


def is_aligned(offset: int, length: int, start: int, alignment: Alignment) -> bool:
    """Return whether the kernel takes a read to the address `start` as it is."""
    memory, block, _ = alignment
    return not (offset % block or length % block or start % memory)


def address(buffer: memoryview) -> int:
    """Return the address of a writable buffer that is not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _fits(buffer: memoryview, alignment: int) -> bool:
    return alignment == 1 or not address(buffer) % alignment
