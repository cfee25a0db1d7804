"""A process of a program that has mapped the model: what it chose, and what it is told to map."""

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

from moepack.keys import ExpertKey
from moepack.pager import messages
from moepack.pager.mapped_model import MappedModel, PartSpan
from moepack.pager.messages import Do, Said, Say, op
from moepack.sizes import align

_PAGE = mmap.PAGESIZE
_AWAITED, _COPIED = 1 << 31, 1 << 30
_USERFAULTFD = "anon_inode:[userfaultfd]"
_PATIENCE = 1.0
"""Seconds in which a process evicts what it is told to; one that was stopped does not."""


class ProgramEndedError(Exception):
    """The process has ended, or closed its connection."""


class Choice(NamedTuple):
    """What a layer's router chose: for each of `token_count` tokens as many experts, in turn.

    The program waits for them where it `is_awaited`: not all are mapped. It does not need them
    where it `is_copied`: it copied all of the layer while it loaded, as into a GPU's memory.
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
        """Yield what is left of this where another one has been mapped over it."""
        before = other.address - self.address
        behind = other.address + align(other.length, _PAGE) - self.address
        if before > 0:
            yield self._replace(length=min(self.length, before))
        if behind < self.length:
            start = max(0, behind)
            place = {"address": self.address + start, "offset": self.offset + start}
            yield self._replace(length=self.length - start, **place)


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
        """Experts that it was told to evict, by the numbers of the operations."""
        self._last_refused: set[ExpertKey] = set()
        self._messages: deque[Said] = deque()
        self.resident: set[ExpertKey] = set()
        self.is_watching = True
        """Whether it announces choices."""
        self.regions: list[Region] = []
        self.shared_pages: set[int] = set()
        """Pages of an image that parts share, and that it has."""
        self.faults: int | None = None
        """The descriptor of its page faults, once it has mapped an image."""
        self._file_count = len(model.descriptors)
        self._has_image = model.image is not None
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
            descriptors = [table, pool]
            if model.image is not None:
                descriptors.append(model.image)
            welcome = messages.WELCOME.pack(
                *(messages.VERSION, *counts, len(model.descriptors)),
                *(model.experts_offset, os.getpid()),
            )
            rights = array.array("i", descriptors)
            self._connection.sendmsg(
                [welcome], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights.tobytes())]
            )
        finally:
            os.close(table)
        words = memoryview(self._table)[start:]
        self._rings = [
            _Ring(words[number * messages.RING_LENGTH : (number + 1) * messages.RING_LENGTH])
            for number in range(messages.MAX_CONTEXTS)
        ]

    def fileno(self) -> int:
        """Return what is readable when it has told something."""
        return self._connection.fileno()

    @property
    def has_messages(self) -> bool:
        """Whether there are messages that came while an answer was waited for."""
        return bool(self._messages)

    def told(self) -> Iterator[Said]:
        """Yield what it has told, in turn: also what came while something else was waited for."""
        while True:
            message = self._messages.popleft() if self._messages else self._receive()
            if message is None:
                return
            yield message

    def _receive(self) -> Said | None:
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
            self._take_faults(*struct.unpack_from("i", rights))
        return messages.decode(data)

    def _take_faults(self, descriptor: int) -> None:
        """Take the descriptor of page faults. Raises ValueError for one that is none."""
        is_first = self.faults is None and self._has_image
        if not is_first or os.readlink(f"/proc/self/fd/{descriptor}") != _USERFAULTFD:
            os.close(descriptor)
            raise ValueError("no descriptor of page faults")
        self.faults = descriptor

    def choices(self, awaited: int | None = None) -> Iterator[tuple[int, Choice]]:
        """Take what was chosen and not yet taken, with the number of its context.

        A choice that the program waits for is taken only of the context `awaited`, as its last.
        """
        for number, ring in enumerate(self._rings[: self._context_count]):
            for choice in ring.take(number == awaited):
                yield number, choice

    def add_context(self, said: Said) -> None:
        """Take that it computes in one more context."""
        self._context_count = said.number + 1

    def add_region(self, said: Said) -> None:
        """Take that it has mapped a file, maybe where another had been.

        Raises ValueError for a file that is none.
        """
        if said.number >= self._file_count:
            raise ValueError("no such file")
        region = Region(said.number, said.address, said.offset, said.length)
        # What the program unmapped of another one, as libllama does with headers, is free for this.
        self.regions = [rest for one in self.regions for rest in one.without(region)]
        self.regions.append(region)
        self.shared_pages.clear()

    def offset_of(self, address: int) -> int | None:
        """Return which byte of the file lies at an address; None where no file is mapped."""
        for region in self.regions:
            if 0 <= address - region.address < align(region.length, _PAGE):
                return region.offset + address - region.address
        return None

    def addresses(self, offset: int) -> Iterator[int]:
        """Yield where a byte of the image lies."""
        for region in self.regions:
            if 0 <= offset - region.offset < region.length:
                yield region.address + offset - region.offset

    def do(self, operations: Sequence[bytes]) -> None:
        """Tell it to do operations, and do not wait."""
        for start in range(0, len(operations), messages.MAX_OPS):
            piece = operations[start : start + messages.MAX_OPS]
            try:
                self._connection.sendall(b"".join(piece))
            except OSError as error:
                raise ProgramEndedError from error

    def evict(self, experts: Iterable[tuple[ExpertKey, Iterable[PartSpan]]]) -> set[ExpertKey]:
        """Have it map experts no more; return those that it needs yet.

        Of a process that does not answer, as it was stopped, it needs all.
        """
        operations: list[bytes] = []
        numbers: dict[int, ExpertKey] = {}
        refused: set[ExpertKey] = set()
        for key, spans in experts:
            if len(operations) + 64 > messages.MAX_OPS:
                refused |= self._refused(operations, numbers)
                operations, numbers = [], {}
            numbers[len(operations)] = key
            operations.append(op(Do.EVICT, layer=key.layer, expert=key.expert))
            for span in spans:
                start, end = span.whole_pages
                if start < end:
                    restored = {"file": span.file, "offset": start, "length": end - start}
                    operations.append(op(Do.RESTORE, **restored))
        return refused | self._refused(operations, numbers)

    def _refused(self, operations: list[bytes], numbers: dict[int, ExpertKey]) -> set[ExpertKey]:
        if not operations:
            return set()
        if not self.is_late:
            self.do([*operations, op(Do.DONE)])
            self._unanswered = numbers
            self._wait_for_done(_PATIENCE)
        return set(numbers.values()) if self.is_late else self._last_refused

    @property
    def is_late(self) -> bool:
        """Whether it has not said yet that it evicted what it was told to."""
        return self._unanswered is not None

    def _wait_for_done(self, seconds: float | None) -> None:
        """Wait until it has done what it was told, but not longer than so many seconds."""
        limit = None if seconds is None else 1000 * seconds
        while self._readable.poll(limit):
            message = self._receive()
            if message is None:
                continue
            if message.kind is Say.DONE:
                self.take_done(message)
                return
            self._messages.append(message)

    def take_done(self, said: Said) -> None:
        """Take that it has evicted experts, but for those which it needs yet.

        Raises ValueError where nobody asked for that.
        """
        numbers, self._unanswered = self._unanswered, None
        if numbers is None or not numbers.keys() >= set(said.refused):
            raise ValueError("an answer to nothing")
        self._last_refused = {numbers[number] for number in said.refused}
        self.resident.difference_update(set(numbers.values()) - self._last_refused)

    def finish(self) -> None:
        """Wait until it has done all that it was told."""
        if self.is_late:
            self._wait_for_done(None)
        self.do([op(Do.DONE)])
        self._unanswered = {}
        self._wait_for_done(None)

    def close(self) -> None:
        """Forget the process; without the connection the library ends it."""
        self._connection.close()
        if self.faults is not None:
            os.close(self.faults)
            self.faults = None


class _Ring:
    """Choices of one context, as `struct ring` in preload.c has them."""

    def __init__(self, memory: memoryview) -> None:
        self._head = memory[:8].cast("Q")
        self._tail = memory[64:72].cast("Q")
        self._words = memory[4096:].cast("I")

    def take(self, takes_awaited: bool) -> Iterator[Choice]:
        head, tail = self._head[0], self._tail[0]
        while tail < head:
            word, row_count, column_count = self._read(tail, 3)
            is_awaited = bool(word & _AWAITED)
            if is_awaited and not takes_awaited:
                return
            count = row_count * column_count
            experts = self._read(tail + 3, count)
            tail += 3 + count
            self._tail[0] = tail
            layer = word & ~(_AWAITED | _COPIED)
            yield Choice(layer, row_count, experts, is_awaited, bool(word & _COPIED))

    def _read(self, start: int, count: int) -> list[int]:
        first = start % messages.RING_WORDS
        words = self._words[first : first + count].tolist()
        if len(words) < count:
            words += self._words[: count - len(words)].tolist()
        return words
