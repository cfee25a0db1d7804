"""Write data files whose parts are stored by a codec, as far as that makes them shorter.

Where a part lies depends on how short those before it became. So threads read and compress parts,
some of them ahead, and one thread places and writes them in the order of the plan. The same input
gives the same bytes, whatever the threads.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from moepack import digest
from moepack.packing.codec import Codec, is_worth_it
from moepack.packing.finished_files import FinishedFile, StoredParts
from moepack.packing.plan import Plan, PlannedFile, Template, place_parts
from moepack.storage.copying import BUFFER_LENGTH, create
from moepack.storage.extents import Extent, Run
from moepack.storage.frames import compress
from moepack.storage.inputs import Inputs
from moepack.storage.run_writer import RunWriter
from moepack.storage.thread_pool import ThreadPool

_AHEAD = 2
"""Parts that are in memory for each thread."""


class _Part(NamedTuple):
    """A part, its digest, and its frame; the frame is None where it is not worth decoding."""

    data: bytes
    digest: int
    frame: bytes | None


class CompressedFiles:
    """Writes files of blobs into the folder `target`; `write` does it.

    `advanced` is called with the bytes done since its last call, as the plan counts them.
    """

    def __init__(
        self, target: Path, inputs: Inputs, plan: Plan, advanced: Callable[[int], None]
    ) -> None:
        assert plan.layout.codec is not None
        self._codec: Codec = plan.layout.codec
        self._target = target
        self._inputs = inputs
        self._plan = plan
        self._advanced = advanced
        self._buffer = memoryview(bytearray(BUFFER_LENGTH))

    def write(
        self, files: Sequence[PlannedFile], threads: int, finished: Callable[[FinishedFile], None]
    ) -> None:
        """Write and sync `files`, compressing in `threads`; call `finished` after each.

        Each file is locked until `finished` has returned. Raises what reading and writing raise.
        """
        with ThreadPool(max_workers=threads) as pool:
            try:
                for file in files:
                    self._write(file, pool, _AHEAD * threads, finished)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _write(
        self,
        file: PlannedFile,
        pool: ThreadPool,
        ahead: int,
        finished: Callable[[FinishedFile], None],
    ) -> None:
        with open(create(self._target / file.name), "wb", buffering=0) as opened:
            digests, stored = array("Q"), StoredParts(array("Q"), array("Q"))
            parts = self._parts(file, pool, ahead)
            start = 0
            for blob in file.blobs:
                template = self._plan.templates[blob.template]
                held = list(islice(parts, len(template.parts)))
                data, offsets, length = self._as_stored(template, held)
                run = Run(start, start + length, 0, (), is_last=False)
                writer = RunWriter(opened.fileno(), run, self._buffer, _ignored)
                for part, offset in zip(data, offsets, strict=True):
                    writer.pad_to(start + offset)
                    writer.write(part)
                writer.finish()
                digests.extend(part.digest for part in held)
                stored.lengths.extend(map(len, data))
                stored.digests.extend(map(digest.of, data))
                start += length
                self._advanced(template.length)
            os.fsync(opened.fileno())
            finished(FinishedFile(file.name, digests, stored))

    def _as_stored(
        self, template: Template, parts: Sequence[_Part]
    ) -> tuple[list[bytes], tuple[int, ...], int]:
        """Return what is stored of the parts of a blob, their offsets in it, and its length."""
        data = [part.data if part.frame is None else part.frame for part in parts]
        lengths = [len(part) for part in data]
        offsets, length = place_parts(template.parts, lengths, self._plan.layout)
        if length < template.length:
            return data, offsets, length
        # Padding takes all that the frames save, so there is nothing to decode them for.
        return [part.data for part in parts], template.offsets_in_blob, template.length

    def _parts(self, file: PlannedFile, pool: ThreadPool, ahead: int) -> Iterator[_Part]:
        """Yield the parts of a file in order; up to `ahead` of them are being made meanwhile."""
        making: deque[Future[_Part]] = deque()
        for extent in self._plan.extents(file):
            making.append(pool.submit(self._part, extent))
            if len(making) == ahead:
                yield making.popleft().result()
        while making:
            yield making.popleft().result()

    def _part(self, extent: Extent) -> _Part:
        data = self._inputs.read(extent.input, extent.input_offset, extent.length)
        frame: bytes | None = compress(data, self._codec.level)
        if frame is not None and not is_worth_it(len(frame), len(data)):
            frame = None
        return _Part(data, digest.of(data), frame)


def _ignored(length: int) -> None:
    """Count nothing: what is written is shorter than planned."""
