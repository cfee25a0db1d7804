"""Memory for what is read: new, of a pool, or the caller's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moepack.errors import MachineError, RequestError
from moepack.reading.expert_read import Memory, ScatteredMemory
from moepack.storage.buffers import writable_bytes

if TYPE_CHECKING:
    from moepack.reading.expert_read import ExpertRead
    from moepack.storage.arena import Arena
    from moepack.storage.buffers import BufferPool


def new_memory(arena: Arena, read: ExpertRead) -> Memory:
    """Return memory that lies within its pages as the reads lie within theirs."""
    if not read.length:  # a tensor may have no bytes
        return Memory(memoryview(bytearray()))
    try:
        pages = arena.take(read.pages_length)
    except MachineError as error:
        first = read.file_reads[0]
        error.path = str(first.path)
        error.place = read.place(first)
        raise
    lead = read.lead
    view = pages[lead : lead + read.length] if lead or len(pages) > read.length else pages
    return Memory(view, pages)


def pooled(pool: BufferPool, read: ExpertRead) -> Memory | None:
    """Return a buffer of the pool, None where all are taken."""
    view = pool.take(read.length)
    return None if view is None else Memory(view)


def wanted_memory(buffer: Any, read: ExpertRead) -> Memory | ScatteredMemory:
    """Return the caller's memory: one buffer, or several by the names of the parts."""
    if not isinstance(buffer, Mapping):
        return callers_memory(buffer, read)
    try:
        return ScatteredMemory(read, buffer)
    except RequestError as error:
        error.place = error.place or read.owner
        raise


def callers_memory(buffer: Any, read: ExpertRead) -> Memory:
    """Return the caller's buffer; raise RequestError for one that will not do."""
    try:
        return Memory(writable_bytes(buffer, read.length))
    except RequestError as error:
        error.place = read.place(read.file_reads[0])
        raise


def check_pool(pool: BufferPool, reads: list[ExpertRead]) -> None:
    """Raise RequestError where the buffers of a pool are too small."""
    for read in reads:
        if read.length > pool.length:
            raise RequestError(
                "the pool's buffers are too small",
                place=read.place(read.file_reads[0]),
                expected=f"{read.length:,} bytes",
                found=pool.length,
            )
