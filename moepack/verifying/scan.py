"""Read what is to be proven, and compare it: digests, padding, the source's bytes.

Threads take runs of any file, so that one large file keeps all of them busy. A piece is read into a
buffer that stays in the processor's cache, and all that is to be known about it is computed there.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack
from pathlib import Path

from moepack import digest
from moepack.errors import MachineError, SourceError, is_shortage, read_failure
from moepack.storage.regular_file import open_regular
from moepack.storage.thread_pool import ThreadPool
from moepack.verifying.extents import Extent, Frame, Run, SourceRange
from moepack.verifying.memory import Buffer, Memory
from moepack.verifying.report import Finding, Findings

# Threads hand the interpreter on around each piece: small pieces cost more than a larger cache.
PIECE_LENGTH = 1 << 20
_ZEROS = Buffer(PIECE_LENGTH)


class _ShortFileError(Exception):
    """The file ended before it should."""


class _StoppedError(Exception):
    """Another thread failed, or the user interrupted: this one stops."""


SecondOpinion = Callable[[Extent, int, int], Memory | None]
"""Gives what `length` bytes of an extent's content have to be, from a number on; None: unknown."""


class Gap(tuple[int, int, int]):
    """A range of a shard that the pack does not hold, so that it has to be zeros.

    The number of the shard, and the offsets from its start where the range begins and ends.
    """

    __slots__ = ()


class Scan:
    """One pass over a pack's files at `paths` and over the shards; `run` does it.

    Leaves the bytes that were read of the pack in `read_length`, and those of the source that were
    compared in `compared_length`. `advanced` is told of the former, from one thread at a time. What
    extents hold is compared with a `second_opinion` as well, `second_length` bytes of it.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        shard_paths: Sequence[str],
        advanced: Callable[[int], None],
        findings: Findings,
        second_opinion: SecondOpinion | None = None,
    ) -> None:
        self.paths = paths
        self.shard_paths = shard_paths
        self.findings = findings
        self.second_opinion = second_opinion
        self.read_length = 0
        self.compared_length = 0
        self.second_length = 0
        self._advanced = advanced
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, work: Iterable[Run | Gap], threads: int) -> None:
        """Look at all of `work`. Raises SourceError and MachineError for what is not the pack's."""
        shared = iter(work)
        with ExitStack() as stack:
            shards = [self._open_shard(path, stack) for path in self.shard_paths]
            executor = stack.enter_context(ThreadPool(max_workers=threads))
            try:
                futures = [executor.submit(self._work, shared, shards) for _ in range(threads)]
                # Not one after the other: a thread that was stopped would hide the one that failed.
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                self._stop.set()
                executor.shutdown(cancel_futures=True)
                raise

    def _open_shard(self, path: str, stack: ExitStack) -> int:
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise read_failure(error, path, SourceError) from None
        stack.callback(os.close, descriptor)
        return descriptor

    def _work(self, work: Iterator[Run | Gap], shards: Sequence[int]) -> None:
        with _Reader(self, shards) as reader:
            while (taken := self._next(work)) is not None:
                reader.look_at(taken)
                self._add(reader)

    def _next(self, work: Iterator[Run | Gap]) -> Run | Gap | None:
        with self._lock:
            return next(work, None)

    def _add(self, reader: "_Reader") -> None:
        with self._lock:
            self.compared_length += reader.compared_length
            self.second_length += reader.second_length
            self.findings.all += reader.findings
        reader.compared_length = reader.second_length = 0
        reader.findings.clear()

    def advance(self, length: int) -> None:
        """Count bytes that were read of the pack, or stop."""
        if self._stop.is_set():
            raise _StoppedError
        with self._lock:
            self.read_length += length
            self._advanced(length)


class _Reader:
    """One thread's buffers, its open file of the pack, and what it found."""

    def __init__(self, scan: Scan, shards: Sequence[int]) -> None:
        self.scan = scan
        self.shards = shards
        self.findings: list[Finding] = []
        self.compared_length = self.second_length = 0
        self._ours = Buffer(PIECE_LENGTH)
        self._theirs = Buffer(PIECE_LENGTH)
        self._file = -1
        self._descriptor = -1

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._file = self._descriptor = -1

    def look_at(self, work: Run | Gap) -> None:
        """Look at a run of a file, or at a range of a shard that has to be zeros."""
        if isinstance(work, Gap):
            self._check_gap(*work)
            return
        try:
            if work.file != self._file:
                self._close()
                self._descriptor = open_regular(self.scan.paths[work.file])
                self._file = work.file
            self._check_run(work)
        except _ShortFileError:
            self._find("file", "it became shorter while it was read", work, offset=work.start)
        except OSError as error:
            message = f"cannot read: {error.strerror}"
            if is_shortage(error):
                raise MachineError(message, path=self.scan.paths[work.file]) from None
            self._find("file", message, work, offset=work.start)

    def _find(
        self, kind: str, message: str, run: Run, extent: Extent | None = None, *, offset: int
    ) -> None:
        file = self.scan.paths[run.file].name
        names = (None,) * 4 if extent is None else extent[3:7]
        self.findings.append(Finding(kind, message, *names, file=file, offset=offset))

    def _check_run(self, run: Run) -> None:
        position = run.start
        for extent in run.extents:
            self._check_padding(run, position, extent.offset)
            self._check_extent(run, extent)
            position = max(position, extent.end)
        self._check_padding(run, position, run.end)

    def _check_padding(self, run: Run, position: int, end: int) -> None:
        """Report the first byte of a range that is not zero."""
        is_zero = True
        for at in range(position, end, PIECE_LENGTH):
            length = min(end - at, PIECE_LENGTH)
            self._fill(self._ours, length, at)
            first = self._ours.first_difference(_ZEROS, length) if is_zero else None
            if first is not None:
                is_zero = False
                message = f"is {self._ours.view[first]:#04x}, not zero"
                self._find("padding", message, run, offset=at + first)

    def _check_extent(self, run: Run, extent: Extent) -> None:
        if extent.frame is not None:
            self._check_frame(run, extent, extent.frame)
            return

        def fill(at: int, length: int) -> None:
            self._fill(self._ours, length, extent.offset + at)

        self._check_content(run, extent, extent.length, fill)

    def _check_frame(self, run: Run, extent: Extent, frame: Frame) -> None:
        """Check the digest of a frame, and what it is decoded to: the one may not be the other's.

        It is read twice, the second time from the page cache; so there is no need to have it all in
        memory.
        """
        from moepack.storage.frames import FrameError, FrameStream  # they load the codec

        computed = digest.stream()
        for at in range(0, extent.length, PIECE_LENGTH):
            length = min(extent.length - at, PIECE_LENGTH)
            self._fill(self._ours, length, extent.offset + at)
            computed.update(self._ours.view[:length])
        if frame.digest is not None and computed.intdigest() != frame.digest:
            message = f"the digest of its stored bytes is {digest.to_text(computed.intdigest())}, "
            message += f"the index says {digest.to_text(frame.digest)}"
            self._find("stored", message, run, extent, offset=extent.offset)

        def read_at(offset: int, length: int) -> bytearray:
            data = bytearray(length)
            _fill(self._descriptor, memoryview(data), extent.offset + offset)
            return data

        try:
            content = FrameStream(read_at, extent.length, frame.content_length)

            def fill(at: int, length: int) -> None:
                content.read_into(self._ours.view[:length])

            self._check_content(run, extent, frame.content_length, fill)
        except FrameError as error:
            message = f"it cannot be decoded: {error}"
            self._find("codec", message, run, extent, offset=extent.offset)

    def _check_content(
        self, run: Run, extent: Extent, content_length: int, fill: Callable[[int, int], None]
    ) -> None:
        """Check what an extent holds; `fill` gets the next bytes of it, from the first on."""
        computed = None if extent.digest is None else digest.stream()
        has_sha256 = extent.sha256 is not None or extent.strong is not None
        sha256 = hashlib.sha256() if has_sha256 else None
        source, second_opinion = extent.source, self.scan.second_opinion
        for at in range(0, content_length, PIECE_LENGTH):
            length = min(content_length - at, PIECE_LENGTH)
            fill(at, length)
            if computed is not None:
                computed.update(self._ours.view[:length])
            if sha256 is not None:
                sha256.update(self._ours.view[:length])
            if source is not None and not self._is_same(run, extent, source, at, length):
                source = None  # one finding is enough
            if second_opinion is not None:
                theirs = second_opinion(extent, at, length)
                if theirs is not None and not self._agrees(run, extent, theirs, at, length):
                    second_opinion = None
        if computed is not None and computed.intdigest() != extent.digest:
            assert extent.digest is not None
            message = f"its digest is {digest.to_text(computed.intdigest())}, "
            message += f"the index says {digest.to_text(extent.digest)}"
            self._find("digest", message, run, extent, offset=extent.offset)
        elif sha256 is not None:
            self._check_sha256(run, extent, sha256.digest())

    def _check_sha256(self, run: Run, extent: Extent, computed: bytes) -> None:
        """Compare a SHA-256 with those that manifest and index say."""
        if extent.sha256 not in (None, computed.hex()):
            message = f"the SHA-256 of this header is {computed.hex()}, the manifest says "
            self._find("manifest", message + f"{extent.sha256}", run, extent, offset=extent.offset)
        if extent.strong not in (None, computed):
            assert extent.strong is not None
            message = f"its SHA-256 is {computed.hex()}, the index says {extent.strong.hex()}"
            self._find("digest", message, run, extent, offset=extent.offset)

    def _is_same(self, run: Run, extent: Extent, source: SourceRange, at: int, length: int) -> bool:
        """Compare the piece at `at` with the source; report the first byte that differs."""
        start = source.offset + at
        self._fill_theirs(source.shard, start, length)
        first = self._ours.first_difference(self._theirs, length)
        if first is None:
            return True
        message = (
            f"byte {at + first:,} of it is {self._ours.view[first]:#04x}, the source has "
            f"{self._theirs.view[first]:#04x} at byte {start + first:,} of "
            f"{os.path.basename(self.scan.shard_paths[source.shard])}"
        )
        in_file = at + first if extent.frame is None else 0  # else it is somewhere in the frame
        self._find("bytes", message, run, extent, offset=extent.offset + in_file)
        return False

    def _agrees(self, run: Run, extent: Extent, theirs: Memory, at: int, length: int) -> bool:
        """Compare the piece at `at` with what gguf-py reads; report the first byte that differs."""
        self.second_length += length
        first = self._ours.first_difference(theirs, length)
        if first is None:
            return True
        message = f"byte {at + first:,} of it is {self._ours.view[first]:#04x}, gguf-py reads "
        message += f"{theirs.view[first]:#04x} in the source"
        in_file = at + first if extent.frame is None else 0
        self._find("gguf-py", message, run, extent, offset=extent.offset + in_file)
        return False

    def _check_gap(self, shard: int, position: int, end: int) -> None:
        """Report the first byte of a shard's range that is not zero."""
        while position < end:
            length = min(end - position, PIECE_LENGTH)
            self._fill_theirs(shard, position, length)
            first = self._theirs.first_difference(_ZEROS, length)
            if first is not None:
                name = os.path.basename(self.scan.shard_paths[shard])
                message = f"the pack does not hold bytes {position + first:,} to {end:,} of a shard"
                where = {"file": name, "offset": position + first}
                self.findings.append(Finding("missing", message, **where))  # type: ignore[arg-type]
                return
            position += length

    def _fill(self, buffer: Buffer, length: int, offset: int) -> None:
        _fill(self._descriptor, buffer.view[:length], offset)
        self.scan.advance(length)

    def _fill_theirs(self, shard: int, offset: int, length: int) -> None:
        path = self.scan.shard_paths[shard]
        try:
            _fill(self.shards[shard], self._theirs.view[:length], offset)
        except _ShortFileError:
            raise SourceError("ends too early", path=path, place=f"byte {offset:,}") from None
        except OSError as error:
            raise read_failure(error, path, SourceError) from None
        self.compared_length += length


def _fill(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        length = os.preadv(descriptor, [view], offset)
        if not length:
            raise _ShortFileError
        view = view[length:]
        offset += length
