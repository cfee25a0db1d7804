"""The control file: memory that moepack and the programs with its library share while they run.

The structs are those of native/table.h. Programs write statistics and selections, and wait for
nobody; moepack writes the budget, and reads.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_PAGE = 4096
_MAX_PROCESSES, _MAX_CONTEXTS = 32, 64
_RING_WORDS = 1 << 18
_RING_LENGTH = _PAGE + 4 * _RING_WORDS
_PROCESS_LENGTH = 3 * _PAGE
_RINGS = _PAGE + _MAX_PROCESSES * _PROCESS_LENGTH
_LENGTH = _RINGS + _MAX_PROCESSES * _MAX_CONTEXTS * _RING_LENGTH
_LIVE, _ENDED = 1, 2
_STATISTICS = struct.Struct("<28Q")
_STATISTICS_END = 8 + _STATISTICS.size
_ERROR = struct.Struct("<2i4I2Q512s")
_NO_EXPERT = (1 << 32) - 1
_LOCK = struct.Struct("hhqqi4x")
"""struct flock of 64-bit systems: type, whence, start, length, process."""
_COPIED, _PROMPT = 1 << 30, 1 << 29
_WRITE, _WATCH_ALL = 1, 2


class Selection(NamedTuple):
    """The experts to which a layer routed `token_count` tokens, the same number for each, in turn.

    If it `is_copied` the program does not need them: it copied all of the layer while it loaded, as
    into a GPU's memory. It `is_prompt` with more tokens than those of decoding.
    """

    layer: int
    token_count: int
    experts: Sequence[int]
    is_copied: bool = False
    is_prompt: bool = False


class CacheStatistics(NamedTuple):
    """The counts of a program's cache; lengths are bytes, in whole pages.

    Of `memory`, `budget` is ordered by the policy. Decoding is the calls of the model for up to 16
    tokens: `decoding_count` of them, for `decoded_count` tokens, in so many nanoseconds; each used
    experts of some bytes, `decoded_length` all together.
    """

    hit_count: int = 0
    miss_count: int = 0
    read_length: int = 0
    wait_nanoseconds: int = 0
    fault_count: int = 0
    resident_length: int = 0
    slots_length: int = 0
    memory: int = 0
    routed_count: int = 0
    holds_all: int = 0
    is_warming: int = 0
    wasted_length: int = 0
    budget: int = 0
    decoding_count: int = 0
    decoded_count: int = 0
    decoding_nanoseconds: int = 0
    decoded_length: int = 0
    guessed_count: int = 0
    right_count: int = 0
    ahead_count: int = 0
    ahead_right_count: int = 0
    control_count: int = 0
    control_right_count: int = 0
    guesses_are_off: int = 0
    draft_hit_count: int = 0
    draft_miss_count: int = 0
    evicted_count: int = 0
    rechecked_count: int = 0

    def ended(self) -> "CacheStatistics":
        """Return these of a program that has ended: counts stay, memory does not."""
        return self._replace(resident_length=0, slots_length=0, memory=0, holds_all=0, is_warming=0)


class Prefetches(NamedTuple):
    """Experts that the next layer's router named while a layer was computed, in decoding.

    Of `guessed_count` experts `right_count` were routed to; `read_count` of them were missing and
    read, of which `used_count` were routed to. `control_count` times a layer's own router was asked
    with its own input: if it too often does not name what was routed, as in models whose routers
    are not understood, prefetching `is_off` from then on.
    """

    guessed_count: int = 0
    right_count: int = 0
    read_count: int = 0
    used_count: int = 0
    control_count: int = 0
    control_right_count: int = 0
    is_off: bool = False

    def since(self, before: "Prefetches") -> "Prefetches":
        """Return what was counted after `before`, and whether it is off now."""
        return Prefetches(
            self.guessed_count - before.guessed_count,
            self.right_count - before.right_count,
            self.read_count - before.read_count,
            self.used_count - before.used_count,
            self.control_count - before.control_count,
            self.control_right_count - before.control_right_count,
            self.is_off,
        )


@dataclass(frozen=True, slots=True)
class ExpertUsage:
    """The experts that programs have needed so far.

    Lookups are counted when they are announced: not while all experts stay in memory, which
    `holds_all` says of now. Those in layers for multi-token prediction, which only draft, are
    counted apart. `fault_count` is accesses to experts that no router had announced.
    `resident_length` is memory that is taken, in whole pages, `expert_length` the experts in it.
    `routed_count` is tokens that were routed: of one that half of the layers have computed it is
    one half. `wasted_length` is what was prefetched for decoding or prompts, and not used. Of
    reads of experts that were right before, `rechecked_count` were compared with their digests
    again. Lengths are bytes.
    """

    hit_count: int
    miss_count: int
    read_length: int
    read_seconds: float
    fault_count: int
    resident_length: int
    budget: int
    holds_all: bool
    expert_length: int
    routed_count: int
    prefetches: Prefetches
    wasted_length: int
    draft_hit_count: int = 0
    draft_miss_count: int = 0
    rechecked_count: int = 0


class ProgramError(NamedTuple):
    """Why a program could not go on: a code of native/cache.h, an errno or 0, and a sentence.

    `expert` is a number of the table, None if it is of none; of its part with the number `part`
    `digest` is that of the bytes that were read, from a mirror or from the pack.
    """

    code: int
    system_error: int
    expert: int | None
    part: int
    is_of_mirror: bool
    digest: int
    problem: str


class Control:
    """The control file; `descriptor` is open as long as programs may start. Raises OSError.

    With a `path`, which programs have in MOEPACK_CONTROL, it is that of a running moepack.
    """

    def __init__(self, path: str | None = None) -> None:
        if path is None:
            self.descriptor = os.memfd_create("moepack-control", os.MFD_CLOEXEC)
        else:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, _LENGTH)
            self._memory = mmap.mmap(self.descriptor, _LENGTH)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._words = memoryview(self._memory).cast("I")
        self._longs = memoryview(self._memory).cast("Q")
        self._past: list[CacheStatistics] = []
        self._past_lost_count = 0
        self.last = CacheStatistics()
        """Of the process that ended last, as it ended."""
        self._reported: dict[int, int] = {}
        """By process, how many of its errors were reported."""
        self.has_served = False
        """Whether any process has mapped the model."""

    def set_memory(self, length: int) -> None:
        """Set the bytes for experts, of all processes together."""
        self._longs[0] = length

    def set_wants(self, *, selections: bool, always: bool) -> None:
        """Set whether programs write selections, and `always`, with all experts in memory too."""
        self._words[2] = _WRITE * selections | _WATCH_ALL * always

    def live(self) -> Iterator[int]:
        """Yield the numbers of live processes; those that have ended are counted, and forgotten."""
        for number in range(_MAX_PROCESSES):
            start = _page(number)
            state = self._words[start // 4]
            if state in (_LIVE, _ENDED):
                self.has_served = True
            if state == _LIVE:
                yield number

    def forget_ended(self) -> list[int]:
        """Keep the counts of processes that have ended, and free their places; return those."""
        ended = []
        for number in range(_MAX_PROCESSES):
            start = _page(number)
            if self._words[start // 4] == _LIVE and self.holder(number) is None:
                self._words[start // 4] = _ENDED
            if self._words[start // 4] == _ENDED:
                ended.append(number)
        return ended

    def holder(self, number: int) -> int | None:
        """Return the id of a process, which holds a lock of a byte until it has ended; or None."""
        lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        kind, *_, process_id = _LOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_GETLK, lock))
        return None if kind == fcntl.F_UNLCK else int(process_id)

    def free(self, number: int) -> None:
        """Free the place of a process that has ended, whose selections were read."""
        start = _page(number)
        self.last = self._read_statistics(number)
        self._past.append(self.last.ended())
        for _, ring in self._rings(number):
            self._past_lost_count += self._longs[ring // 8 + 2]
            self._memory[ring : ring + 24] = bytes(24)
        self._memory[start + 4 : start + _PROCESS_LENGTH] = bytes(_PROCESS_LENGTH - 4)
        self._reported.pop(number, None)
        self._words[start // 4] = 0

    def _read_statistics(self, number: int) -> CacheStatistics:
        return CacheStatistics(*_STATISTICS.unpack_from(self._memory, _page(number) + 8))

    def statistics(self) -> list[CacheStatistics]:
        """Return what all processes have counted so far, those that have ended among them."""
        return [*self._past, *map(self._read_statistics, self.live())]

    def errors(self) -> Iterator[ProgramError]:
        """Yield the errors for which processes could not go on, each once."""
        for number in range(_MAX_PROCESSES):
            start = _page(number) + _STATISTICS_END
            count = self._words[start // 4 + 1]
            if count != self._reported.get(number, 0):
                self._reported[number] = count
                yield self._error_at(start + 8)

    def _error_at(self, start: int) -> ProgramError:
        fields = _ERROR.unpack_from(self._memory, start)
        code, system_error, expert, part, place, _, _, digest, text = fields
        problem = text.split(b"\0", 1)[0].decode(errors="replace")
        number = None if expert == _NO_EXPERT else expert
        return ProgramError(code, system_error, number, part, place == 1, digest, problem)

    def reads(self) -> int:
        """Return the kind of reads of any live process, a number of native/drive.h."""
        for number in self.live():
            return self._words[_page(number) // 4 + 1]
        return 0

    def selections(self, number: int) -> Iterator[tuple[int, Selection]]:
        """Yield the selections of a process since the last time, with the number of the context."""
        for context, ring in self._rings(number):
            for selection in self._read_ring(ring):
                yield context, selection

    def lost_count(self) -> int:
        """Return how many selections were lost, as nobody read them in time."""
        rings = [ring for number in self.live() for _, ring in self._rings(number)]
        return self._past_lost_count + sum(self._longs[ring // 8 + 2] for ring in rings)

    def _rings(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the contexts of a process, and the offsets of their rings."""
        start = _page(number) + _STATISTICS_END
        for context in range(min(self._words[start // 4], _MAX_CONTEXTS)):
            yield context, _RINGS + (number * _MAX_CONTEXTS + context) * _RING_LENGTH

    def _read_ring(self, ring: int) -> Iterator[Selection]:
        head, tail = self._longs[ring // 8], self._longs[ring // 8 + 1]
        if not 0 <= head - tail <= _RING_WORDS:  # damaged
            tail = head
        while tail < head:
            word, row_count, column_count = self._read_words(ring, tail, 3)
            count = row_count * column_count
            if tail + 3 + count > head:  # a damaged ring tells nothing more
                tail = head
                break
            experts = self._read_words(ring, tail + 3, count)
            tail += 3 + count
            self._longs[ring // 8 + 1] = tail
            flags = (bool(word & _COPIED), bool(word & _PROMPT))
            yield Selection(word & ~(_COPIED | _PROMPT), row_count, experts, *flags)
        self._longs[ring // 8 + 1] = tail

    def _read_words(self, ring: int, start: int, count: int) -> list[int]:
        words = (ring + _PAGE) // 4
        first = start % _RING_WORDS
        values = self._words[words + first : words + min(first + count, _RING_WORDS)].tolist()
        if len(values) < count:
            values += self._words[words : words + count - len(values)].tolist()
        return values

    def close(self) -> None:
        """Close the file; programs keep their mappings."""
        self._words.release()
        self._longs.release()
        self._memory.close()
        os.close(self.descriptor)


def _page(number: int) -> int:
    """Return the offset of a process's page in the control file."""
    return _PAGE + number * _PROCESS_LENGTH
