"""Reads rounded outwards to the alignment of direct I/O.

A request may begin and end anywhere, and so may its buffers. If all are aligned, it is read to
where it belongs; any other comes as whole blocks into memory of ours, and is copied.
"""

import ctypes
import os
from collections.abc import Sequence

from moepack.common.sizes import align
from moepack.storage.backend import Completion, ReadRequest, completed
from moepack.storage.buffers import map_memory
from moepack.storage.open_files import Alignment, OpenFiles


def read(files: OpenFiles, number: int, request: ReadRequest) -> Completion:
    """Do one request with positioned reads in this thread."""
    try:
        path, offset, buffer, more = request
        descriptor, alignment, _ = files.get(path)
        if not more and _is_aligned(offset, buffer, alignment):
            length = os.preadv(descriptor, [buffer], offset)
            if length == len(buffer):
                return completed(number, length)
        buffers, block = (buffer, *more), alignment.offset
        if offset % block == 0 and all(_is_aligned(0, one, alignment) for one in buffers):
            return completed(number, _fill(descriptor, buffers, offset, block))
        head = offset % block
        memory = map_memory(align(head + request.length, block))
        filled = _fill(descriptor, (memory,), offset - head, block)
    except OSError as error:
        return Completion(number, 0, error)
    length = min(max(0, filled - head), request.length)
    _copy(memory[head : head + length], buffers)
    return completed(number, length)


def _fill(descriptor: int, buffers: Sequence[memoryview], offset: int, block: int) -> int:
    """Read into buffers, one after another, as far as the file goes; return how many bytes.

    A read that stops off the grid of blocks has reached the end of the file: to go on would take a
    misaligned read, and there is nothing to get.
    """
    done, rest = 0, list(buffers)
    while rest:
        length = os.preadv(descriptor, rest, offset + done)
        done += length
        if not length or done % block:
            break
        while rest and length >= len(rest[0]):
            length -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][length:]
    return done


def _copy(data: memoryview, buffers: Sequence[memoryview]) -> None:
    """Copy bytes into buffers, one after another."""
    for buffer in buffers:
        length = min(len(buffer), len(data))
        buffer[:length], data = data[:length], data[length:]


def _is_aligned(offset: int, buffer: memoryview, alignment: Alignment) -> bool:
    """Return whether the kernel reads from `offset` into a whole buffer as it is."""
    memory, block = alignment
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return not (offset % block or len(buffer) % block or start % memory)
