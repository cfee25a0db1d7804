"""Read the bytes of a pack and compare them: digests, padding, the source's bytes.

Threads take segments of any file, so that one large file keeps all of them busy. A piece is read
into a buffer that stays in the processor's cache, and everything about it is computed there.
"""

import ctypes
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.errors import MoepackError, PackError, SourceError, is_of_machine, read_failure
from moepack.pack.verifying.checked_pack import CheckedRange, Gap, Segment, Where
from moepack.pack.verifying.report import Finding
from moepack.storage.input_file import InputFile, open_input
from moepack.storage.inputs import Inputs
from moepack.storage.thread_pool import run_each

# Threads hand the interpreter on around each piece: small pieces cost more than a larger cache.
PIECE_LENGTH = 1 << 20
_memcmp = ctypes.CDLL(None).memcmp  # which lets other threads run
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Buffer:
    """Bytes in memory: `view` keeps them there, `address` is that of the first."""

    def __init__(self, view: memoryview, address: int) -> None:
        self.view = view
        self._address = address

    @classmethod
    def zeros(cls) -> "Buffer":
        """Make a buffer for a piece, which can be written to."""
        array = (ctypes.c_char * PIECE_LENGTH)()
        return cls(memoryview(array).cast("B"), ctypes.addressof(array))

    def first_difference(self, other: "Buffer", length: int) -> int | None:
        """Return the number of the first of `length` bytes that differs; None if none does."""
        if not _memcmp(self._address, other._address, length):
            return None
        pairs = zip(self.view[:length], other.view[:length], strict=True)
        return next(number for number, (ours, theirs) in enumerate(pairs) if ours != theirs)


_ZEROS = Buffer.zeros()


class _ShortFileError(Exception):
    """The file ended before it should."""


SecondOpinion = Callable[[CheckedRange, int, int], Buffer | None]
"""Returns the expected bytes of a range's content, by their number and length; None if unknown."""


class Scanned(NamedTuple):
    """Findings, the bytes read of the pack, those of the source and of gguf-py compared."""

    findings: list[Finding]
    read_length: int
    compared_length: int
    second_length: int


def scan(
    paths: Sequence[Path],
    shard_paths: Sequence[str],
    work: Iterable[Segment | Gap],
    threads: int,
    advanced: Callable[[int], None],
    second_opinion: SecondOpinion | None = None,
    fault: type[MoepackError] = SourceError,
) -> Scanned:
    """Check segments of a pack's files at `paths`, and gaps of the shards.

    `advanced` is called with the bytes read of the pack, from one thread at a time. Raises `fault`
    for a shard, and MachineError, for what cannot be read: that is never a finding.
    """
    pending = deque(work)
    with Inputs(shard_paths, fault) as shards:

        def check_all(_: int, advanced: Callable[[int], None]) -> Scanned:
            with closing(_Worker(paths, shard_paths, shards, second_opinion, advanced)) as worker:
                while pending:
                    try:
                        segment = pending.popleft()
                    except IndexError:  # another thread took the last one
                        break
                    worker.check(segment)
            lengths = (worker.read_length, worker.compared_length, worker.second_length)
            return Scanned(worker.findings, *lengths)

        scanned = run_each(check_all, range(threads), threads, advanced)
    findings, *lengths = zip(*scanned, strict=True)
    return Scanned([one for several in findings for one in several], *map(sum, lengths))


@dataclass
class _Worker:
    """One thread: its buffers, the file of the pack that it has open, and its findings."""

    paths: Sequence[Path]
    shard_paths: Sequence[str]
    shards: Inputs
    second_opinion: SecondOpinion | None
    advanced: Callable[[int], None]
    findings: list[Finding] = field(default_factory=list)
    read_length: int = 0
    compared_length: int = 0
    second_length: int = 0
    _ours: Buffer = field(default_factory=Buffer.zeros)
    _theirs: Buffer = field(default_factory=Buffer.zeros)
    _number: int = -1
    _file: InputFile | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._number, self._file = -1, None

    def check(self, work: Segment | Gap) -> None:
        """Check a segment of a file, or the zeros in a gap of a shard."""
        if isinstance(work, Gap):
            self._check_gap(*work)
            return
        try:
            if work.file != self._number:
                self.close()
                self._file = open_input(self.paths[work.file])
                self._number = work.file
            position = work.start
            for checked in work.ranges:
                if position < checked.offset:
                    self._check_padding(position, checked.offset)
                self._check_content(checked)
                position = max(position, checked.end)
            self._check_padding(position, work.end)
        except _ShortFileError:
            message = "it became shorter while it was read"
            self._find("file", message, {}, work.start, work.file)
        except OSError as error:
            if is_of_machine(error):
                raise read_failure(error, self.paths[work.file], PackError) from None
            self._find("file", f"cannot read: {error.strerror}", {}, work.start, work.file)

    def _find(
        self, kind: str, message: str, where: Where, offset: int, file: int | None = None
    ) -> None:
        name = self.paths[self._number if file is None else file].name
        self.findings.append(Finding(kind, message, **where, file=name, offset=offset))

    def _check_padding(self, position: int, end: int) -> None:
        is_zero = True
        for at in range(position, end, PIECE_LENGTH):
            length = min(end - at, PIECE_LENGTH)
            self._fill_ours(length, at)
            first = self._ours.first_difference(_ZEROS, length) if is_zero else None
            if first is not None:
                is_zero = False
                message = f"is {self._ours.view[first]:#04x}, not zero"
                self._find("padding", message, {}, at + first)

    def _check_content(self, checked: CheckedRange) -> None:
        computed = None if checked.digest is None else digest.stream()
        has_sha256 = checked.sha256 is not None or checked.strong is not None
        sha256 = hashlib.sha256() if has_sha256 else None
        comparisons = [] if checked.source is None else [self._is_source]
        if self.second_opinion is not None:
            comparisons.append(self._is_read_by_gguf_py)
        for at in range(0, checked.length, PIECE_LENGTH):
            length = min(checked.length - at, PIECE_LENGTH)
            self._fill_ours(length, checked.offset + at)
            piece = self._ours.view[:length]
            if computed is not None:
                computed.update(piece)
            if sha256 is not None:
                sha256.update(piece)
            # One finding of each kind is enough.
            if comparisons:
                comparisons = [one for one in comparisons if one(checked, at, length)]
        if computed is not None and computed.intdigest() != checked.digest:
            assert checked.digest is not None
            message = f"its digest is {digest.to_text(computed.intdigest())}, "
            message += f"the index says {digest.to_text(checked.digest)}"
            self._find("digest", message, checked.where, checked.offset)
        elif sha256 is not None:
            self._check_sha256(checked, sha256.digest())

    def _check_sha256(self, checked: CheckedRange, computed: bytes) -> None:
        if checked.sha256 not in (None, computed.hex()):
            message = f"the SHA-256 of this header is {computed.hex()}, the manifest says "
            self._find("manifest", message + f"{checked.sha256}", checked.where, checked.offset)
        if checked.strong not in (None, computed):
            assert checked.strong is not None
            message = f"its SHA-256 is {computed.hex()}, the index says {checked.strong.hex()}"
            self._find("digest", message, checked.where, checked.offset)

    def _is_source(self, checked: CheckedRange, at: int, length: int) -> bool:
        assert checked.source is not None
        shard, offset = checked.source
        self._fill_theirs(shard, offset + at, length)
        first = self._ours.first_difference(self._theirs, length)
        if first is None:
            return True
        name = os.path.basename(self.shard_paths[shard])
        theirs = f"the source has {self._theirs.view[first]:#04x} at byte {offset + at + first:,}"
        self._find_difference("bytes", checked, at, first, f"{theirs} of {name}")
        return False

    def _is_read_by_gguf_py(self, checked: CheckedRange, at: int, length: int) -> bool:
        assert self.second_opinion is not None
        theirs = self.second_opinion(checked, at, length)
        if theirs is None:
            return True
        self.second_length += length
        first = self._ours.first_difference(theirs, length)
        if first is None:
            return True
        text = f"gguf-py reads {theirs.view[first]:#04x} in the source"
        self._find_difference("gguf-py", checked, at, first, text)
        return False

    def _find_difference(
        self, kind: str, checked: CheckedRange, at: int, first: int, theirs: str
    ) -> None:
        message = f"byte {at + first:,} of it is {self._ours.view[first]:#04x}, {theirs}"
        self._find(kind, message, checked.where, checked.offset + at + first)

    def _check_gap(self, shard: int, position: int, end: int) -> None:
        for at in range(position, end, PIECE_LENGTH):
            length = min(end - at, PIECE_LENGTH)
            self._fill_theirs(shard, at, length)
            first = self._theirs.first_difference(_ZEROS, length)
            if first is not None:
                name = os.path.basename(self.shard_paths[shard])
                message = f"the pack does not hold bytes {at + first:,} to {end:,} of a shard"
                self.findings.append(Finding("missing", message, file=name, offset=at + first))
                return

    def _fill_ours(self, length: int, offset: int) -> None:
        assert self._file is not None
        view = self._ours.view[:length]
        while view:
            count = self._file.read_into(offset, view)
            if not count:
                raise _ShortFileError
            view, offset = view[count:], offset + count
        self.read_length += length
        self.advanced(length)

    def _fill_theirs(self, shard: int, offset: int, length: int) -> None:
        self.compared_length += length
        view = self._theirs.view[:length]
        while view:
            count = self.shards.read_into(shard, offset, view)
            view, offset = view[count:], offset + count
