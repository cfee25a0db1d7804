"""A process of a program that has mapped the model: its messages, selections and mappings."""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from moepack.common.shape import ExpertKey
from moepack.common.sizes import align
from moepack.running.pager import messages
from moepack.running.pager.mapped_model import MappedModel, MappedSpan
from moepack.running.pager.messages import Message, MessageKind, Op, encode

_PAGE = mmap.PAGESIZE
_AWAITED, _COPIED = 1 << 31, 1 << 30
_USERFAULTFD = "anon_inode:[userfaultfd]"
_PATIENCE = 1.0
"""Seconds in which a running process evicts experts; a stopped one does not."""


class ProgramEndedError(Exception):
    """The process has ended, or closed its connection."""


class Selection(NamedTuple):
    """The experts to which a layer routed `token_count` tokens, the same number for each, in turn.

    The program waits for them if it `is_awaited`: not all are mapped. It does not need them if it
    `is_copied`: it copied all of the layer while it loaded, as into a GPU's memory.
    """

    layer: int
    token_count: int
    experts: Sequence[int]
    is_awaited: bool
    is_copied: bool = False


class Region(NamedTuple):
    """A part of a file, from `offset` on, as the process has it mapped."""

    file: int
    address: int
    offset: int
    length: int

    def without(self, other: Region) -> Iterator[Region]:
        """Yield the rest of this region after another one was mapped over it."""
        before = other.address - self.address
        start = max(0, before + align(other.length, _PAGE))
        if before > 0:
            yield self._replace(length=min(self.length, before))
        if start < self.length:
            address, offset = self.address + start, self.offset + start
            yield Region(self.file, address, offset, self.length - start)


class Client:
    """A process that has connected; its methods raise ProgramEndedError.

    `pool` is the descriptor of the experts' memory, `counts` are one more than the highest numbers
    of a layer and of an expert. `resident` are the experts that it has mapped.
    """

    def __init__(
        self, connection: socket.socket, model: MappedModel, pool: int, counts: tuple[int, int]
    ) -> None:
        self._connection = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._context_count = 0
        self._unanswered: dict[int, ExpertKey] | None = None
        """Experts that it was to evict, by the numbers of the operations."""
        self._last_refused: set[ExpertKey] = set()
        self._messages: deque[Message] = deque()
        self.resident: set[ExpertKey] = set()
        self.is_watching = True
        """Whether it announces selections."""
        self.has_requests = True
        """Whether a client is known to wait; true of programs that do not tell."""
        self.regions: list[Region] = []
        self.shared_pages: set[int] = set()
        """Pages of an image that parts share, and that it has."""
        self.faults: int | None = None
        """The descriptor of its page faults, once it has mapped an image."""
        self._file_count = len(model.descriptors)
        self._has_image = model.image is not None
        self._welcome(model, pool, counts)

    def _welcome(self, model: MappedModel, pool: int, counts: tuple[int, int]) -> None:
        """Make the table of file names and rings, and send it with the other descriptors."""
        names = b"".join(
            messages.FILE_NAME.pack(status.st_dev, status.st_ino)
            for status in map(os.fstat, model.descriptors)
        )
        start = align(len(names), _PAGE)
        length = start + messages.MAX_CONTEXTS * messages.RING_LENGTH
        table = os.memfd_create("moepack-choices", os.MFD_CLOEXEC)
        try:
            os.ftruncate(table, length)
            self._table = mmap.mmap(table, length)
            self._table[: len(names)] = names
            descriptors = [table, pool] if model.image is None else [table, pool, model.image]
            layers, experts = counts
            welcome = messages.WELCOME.pack(
                messages.VERSION,
                layers,
                experts,
                len(model.descriptors),
                model.experts_offset,
                os.getpid(),
            )
            rights = array.array("i", descriptors).tobytes()
            self._connection.sendmsg([welcome], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        finally:
            os.close(table)
        view = memoryview(self._table)[start:]
        starts = range(0, len(view), messages.RING_LENGTH)
        self._rings = [_Ring(view[start : start + messages.RING_LENGTH]) for start in starts]

    def fileno(self) -> int:
        """Return the descriptor of the connection, readable when there are messages."""
        return self._connection.fileno()

    @property
    def has_messages(self) -> bool:
        """Whether there are messages that came while an answer was waited for."""
        return bool(self._messages)

    def read_messages(self) -> Iterator[Message]:
        """Yield all messages in turn, those first that came while an answer was waited for."""
        while True:
            message = self._messages.popleft() if self._messages else self._receive()
            if message is None:
                return
            yield message

    def _receive(self) -> Message | None:
        try:
            data, ancillary, _, _ = self._connection.recvmsg(
                messages.MESSAGE_LENGTH,
                socket.CMSG_SPACE(4),
                socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise ProgramEndedError from error
        if not data:
            raise ProgramEndedError
        for _, _, rights in ancillary:
            self._set_faults(*struct.unpack_from("i", rights))
        return messages.decode(data)

    def _set_faults(self, descriptor: int) -> None:
        """Keep the descriptor of page faults. Raises ValueError for another one."""
        is_first = self.faults is None and self._has_image
        if not is_first or os.readlink(f"/proc/self/fd/{descriptor}") != _USERFAULTFD:
            os.close(descriptor)
            raise ValueError("no descriptor of page faults")
        self.faults = descriptor

    def read_selections(self, awaited: int | None = None) -> Iterator[tuple[int, Selection]]:
        """Yield the selections since the last call, with the number of the context.

        A selection that the program waits for is read only of the context `awaited`, as its last.
        """
        for number, ring in enumerate(self._rings[: self._context_count]):
            for selection in ring.read(number == awaited):
                yield number, selection

    def add_context(self, message: Message) -> None:
        """Add a context in which the process computes."""
        self._context_count = message.number + 1

    def add_region(self, message: Message) -> None:
        """Add a file that was mapped, maybe over another. Raises ValueError for an unknown one."""
        if message.number >= self._file_count:
            raise ValueError("no such file")
        region = Region(message.number, message.address, message.offset, message.length)
        # What the program unmapped of another one, as libllama does with headers, is free for this.
        self.regions = [rest for one in self.regions for rest in one.without(region)]
        self.regions.append(region)
        self.shared_pages.clear()

    def offset_of(self, address: int) -> int | None:
        """Return the byte of the file at an address; None if no file is mapped there."""
        for region in self.regions:
            if 0 <= address - region.address < align(region.length, _PAGE):
                return region.offset + address - region.address
        return None

    def addresses(self, offset: int) -> Iterator[int]:
        """Yield the addresses of a byte of the image."""
        for region in self.regions:
            if 0 <= offset - region.offset < region.length:
                yield region.address + offset - region.offset

    def send(self, operations: Sequence[bytes]) -> None:
        """Send operations, without waiting for them."""
        for start in range(0, len(operations), messages.MAX_OPERATIONS):
            piece = operations[start : start + messages.MAX_OPERATIONS]
            try:
                self._connection.sendall(b"".join(piece))
            except OSError as error:
                raise ProgramEndedError from error

    def evict(self, experts: Iterable[tuple[ExpertKey, Iterable[MappedSpan]]]) -> set[ExpertKey]:
        """Unmap experts in the process; return the ones that it still needs.

        A process that does not answer, as it was stopped, needs all.
        """
        operations: list[bytes] = []
        numbers: dict[int, ExpertKey] = {}
        refused: set[ExpertKey] = set()
        for key, spans in experts:
            if len(operations) + 64 > messages.MAX_OPERATIONS:
                refused |= self._evict(operations, numbers)
                operations, numbers = [], {}
            numbers[len(operations)] = key
            operations.append(encode(Op.EVICT, layer=key.layer, expert=key.expert))
            operations += [span.operation(Op.RESTORE) for span in spans if span.has_pages]
        return refused | self._evict(operations, numbers)

    def _evict(self, operations: list[bytes], numbers: dict[int, ExpertKey]) -> set[ExpertKey]:
        if not operations:
            return set()
        if not self.is_late:
            self.send([*operations, encode(Op.DONE)])
            self._unanswered = numbers
            self._wait_for_done(_PATIENCE)
        return set(numbers.values()) if self.is_late else self._last_refused

    @property
    def is_late(self) -> bool:
        """Whether it has not yet acknowledged the last evictions."""
        return self._unanswered is not None

    def _wait_for_done(self, seconds: float | None) -> None:
        limit = None if seconds is None else 1000 * seconds
        while self._readable.poll(limit):
            message = self._receive()
            if message is None:
                continue
            if message.kind is MessageKind.DONE:
                self.acknowledge(message)
                return
            self._messages.append(message)

    def acknowledge(self, message: Message) -> None:
        """Note that experts are unmapped, but for refused ones.

        Raises ValueError if no answer was due.
        """
        numbers, self._unanswered = self._unanswered, None
        if numbers is None or not numbers.keys() >= set(message.refused):
            raise ValueError("an answer to nothing")
        self._last_refused = {numbers[number] for number in message.refused}
        self.resident.difference_update(set(numbers.values()) - self._last_refused)

    def finish(self) -> None:
        """Wait until all operations are done."""
        if self.is_late:
            self._wait_for_done(None)
        self.send([encode(Op.DONE)])
        self._unanswered = {}
        self._wait_for_done(None)

    def close(self) -> None:
        """Close the connection, without which the library ends the process."""
        self._connection.close()
        for ring in self._rings:
            ring.release()
        self._table.close()
        if self.faults is not None:
            os.close(self.faults)
            self.faults = None


class _Ring:
    """Selections of one context, as `struct ring` in preload.c has them."""

    def __init__(self, memory: memoryview) -> None:
        self._head = memory[:8].cast("Q")
        self._tail = memory[64:72].cast("Q")
        self._words = memory[4096:].cast("I")

    def release(self) -> None:
        """Release the memory: its file stays open as long as anything views it."""
        for view in (self._head, self._tail, self._words):
            view.release()

    def read(self, with_awaited: bool) -> Iterator[Selection]:
        head, tail = self._head[0], self._tail[0]
        while tail < head:
            word, row_count, column_count = self._read_words(tail, 3)
            is_awaited = bool(word & _AWAITED)
            if is_awaited and not with_awaited:
                return
            count = row_count * column_count
            experts = self._read_words(tail + 3, count)
            tail += 3 + count
            self._tail[0] = tail
            layer = word & ~(_AWAITED | _COPIED)
            yield Selection(layer, row_count, experts, is_awaited, bool(word & _COPIED))

    def _read_words(self, start: int, count: int) -> list[int]:
        first = start % messages.RING_WORDS
        words = self._words[first : first + count].tolist()
        if len(words) < count:
            words += self._words[: count - len(words)].tolist()
        return words
