"""Reads rounded outwards to the alignment of direct I/O, with as little copying as possible.

A request may begin and end anywhere. Only the blocks at its two ends go through memory of ours;
everything between goes straight into the caller's buffer, as one vectored read:

    file     |....head|  whole blocks  |tail....|
    memory   ours      caller's buffer  ours

If the caller's buffer is itself misaligned, all of it goes through ours; so does a request whose
several buffers are misaligned, or end within a block.
"""

import ctypes
import os

from moepack.common.sizes import align
from moepack.storage.backend import Completion, ReadRequest, completed
from moepack.storage.buffers import map_memory
from moepack.storage.open_files import Alignment, OpenFiles

MAX_PIECES = 32
"""Buffers of one vectored read; more than these go through one of ours."""


class RoundedRead:
    """One request as the kernel gets it: read `pieces`, one after another, from `offset` on.

    `offset` counts from the start of the file. `advance` adds to `done`, `rest` is still to be
    read, and `finish` ends the read.
    """

    def __init__(self, request: ReadRequest, alignment: Alignment) -> None:
        self.done = 0
        self._buffers = buffers = (request.buffer, *request.more)
        self._length, self._block = request.length, alignment.offset
        self._head = request.offset % self._block
        self.offset = request.offset - self._head
        self._copies: list[tuple[int, memoryview]] = []
        is_one_read = len(buffers) <= MAX_PIECES and not self._head
        if is_one_read and all(is_aligned(0, len(b), address(b), alignment) for b in buffers):
            self._pieces = list(buffers)
        elif request.more:
            self._pieces = [self._copied(0, align(self._head + self._length, self._block))]
        else:
            self._pieces = self._rounded(request.buffer, alignment.memory)

    def _rounded(self, buffer: memoryview, memory_alignment: int) -> list[memoryview]:
        block = self._block
        first = -self._head % block
        last = first + (len(buffer) - first) // block * block
        if last <= first or address(buffer[first:]) % memory_alignment:
            return [self._copied(0, align(self._head + len(buffer), block))]
        pieces = [buffer[first:last]]
        if first:
            pieces.insert(0, self._copied(0, block))
        if last < len(buffer):
            pieces.append(self._copied(last, block))
        return pieces

    def _copied(self, start: int, length: int) -> memoryview:
        """Return aligned memory; `finish` copies its bytes to `start` in the buffers."""
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

    def advance(self, length: int) -> bool:
        """Count `length` bytes as read; return whether the read has ended.

        A read that stops off the grid has reached the end of the file: to go on would take a
        misaligned read, and there is nothing to get.
        """
        self.done += length
        is_whole = self.done >= sum(map(len, self._pieces))
        return not length or is_whole or bool(self.done % self._block)

    def finish(self) -> int:
        """Copy the two ends into the buffers; return how many bytes of these were read."""
        length = min(max(0, self.done - self._head), self._length)
        for start, memory in self._copies:
            data = memory[: max(0, length - start)]
            for buffer in self._buffers:  # as if they were one
                count = min(len(data), len(buffer) - start)
                if count > 0:
                    buffer[start : start + count] = data[:count]
                    data = data[count:]
                start = max(0, start - len(buffer))
        return length


def read(files: OpenFiles, number: int, request: ReadRequest) -> Completion:
    """Do one request with positioned reads in this thread."""
    try:
        path, offset, buffer, more = request
        file = files.get(path)
        if not more and is_aligned(offset, len(buffer), address(buffer), file.alignment):
            length = os.preadv(file.descriptor, [buffer], offset)
            if length == len(buffer):
                return completed(number, length)
        rounded, is_ended = RoundedRead(request, file.alignment), False
        while not is_ended:
            position = rounded.offset + rounded.done
            is_ended = rounded.advance(os.preadv(file.descriptor, rounded.rest, position))
    except OSError as error:
        return Completion(number, 0, error)
    return Completion(number, rounded.finish(), None)


def is_aligned(offset: int, length: int, start: int, alignment: Alignment) -> bool:
    """Return whether the kernel takes a read to the address `start` as it is."""
    memory, block = alignment
    return not (offset % block or length % block or start % memory)


def address(buffer: memoryview) -> int:
    """Return the address of a writable buffer that is not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
