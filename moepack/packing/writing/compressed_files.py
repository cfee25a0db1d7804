"""Write data files with parts that a codec has compressed, if that makes them shorter.

The offset of a part depends on how short those before it became. So threads read and compress
parts, some of them ahead, and one thread places and writes them in the order of the plan. The same
input gives the same bytes, whatever the threads.
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

from moepack.common import digest
from moepack.pack.format.contents import Template
from moepack.packing.plan.plan import Plan, PlannedFile, place_parts
from moepack.packing.writing.finished_files import FinishedFile, StoredParts
from moepack.storage.copying import BUFFER_LENGTH, create
from moepack.storage.extents import Extent
from moepack.storage.frames import compress
from moepack.storage.inputs import Inputs
from moepack.storage.run_writer import RunWriter
from moepack.storage.thread_pool import ThreadPool

_AHEAD = 2
"""Parts that are in memory for each thread."""


class _Part(NamedTuple):
    """A part, its digest, and its frame; the frame is None if it is not worth decoding."""

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
        self._level = plan.layout.codec.level
        self._target = target
        self._inputs = inputs
        self._plan = plan
        self._advanced = advanced
        self._buffer = memoryview(bytearray(BUFFER_LENGTH))

    def write(
        self, files: Sequence[PlannedFile], threads: int, finished: Callable[[FinishedFile], None]
    ) -> None:
        """Write and sync `files`, compressing in `threads`; call `finished` after each.

        Each file is locked until `finished` has returned. Raises the errors of reading and writing.
        """
        with ThreadPool(max_workers=threads) as pool:
            for file in files:
                with open(create(self._target / file.name), "wb", buffering=0) as opened:
                    parts = self._parts(file, pool, _AHEAD * threads)
                    digests, stored = self._write(file, opened.fileno(), parts)
                    os.fsync(opened.fileno())
                    finished(FinishedFile(file.name, digests, stored))

    def _write(
        self, file: PlannedFile, descriptor: int, all_parts: Iterator[_Part]
    ) -> tuple[array[int], StoredParts]:
        digests, stored = array("Q"), StoredParts(array("Q"), array("Q"))
        start = 0
        for key in file.blobs:
            template = self._plan.templates[key.template]
            parts = list(islice(all_parts, len(template.parts)))
            data, offsets, length = self._as_stored(template, parts)
            end = start + length
            # Progress is that of the plan: the written bytes are fewer.
            writer = RunWriter(descriptor, start, end, self._buffer, lambda _: None)
            for part, offset in zip(data, offsets, strict=True):
                writer.pad_to(start + offset)
                writer.write(part)
            writer.finish()
            digests.extend(part.digest for part in parts)
            stored.lengths.extend(map(len, data))
            stored.digests.extend(map(digest.xxh3, data))
            start += length
            self._advanced(template.length)
        return digests, stored

    def _as_stored(
        self, template: Template, parts: Sequence[_Part]
    ) -> tuple[list[bytes], tuple[int, ...], int]:
        """Return the stored bytes of a blob's parts, their offsets in it, and its length."""
        data = [part.data if part.frame is None else part.frame for part in parts]
        lengths = [len(part) for part in data]
        offsets, length = place_parts(template.parts, lengths, self._plan.layout)
        if length < template.length:
            return data, offsets, length
        # Padding takes all that the frames save, so there is nothing to decode them for.
        return [part.data for part in parts], template.offsets_in_blob, template.length

    def _parts(self, file: PlannedFile, pool: ThreadPool, ahead: int) -> Iterator[_Part]:
        """Yield the parts of a file in order, while up to `ahead` others are being compressed."""
        futures: deque[Future[_Part]] = deque()
        for extent in self._plan.extents(file):
            futures.append(pool.submit(self._compress, extent))
            if len(futures) == ahead:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()

    def _compress(self, extent: Extent) -> _Part:
        data = self._inputs.read(extent.input, extent.input_offset, extent.length)
        frame: bytes | None = compress(data, self._level)
        # A part that is shortened by less than a twentieth is not worth decoding.
        if frame is not None and 20 * len(frame) > 19 * len(data):
            frame = None
        return _Part(data, digest.xxh3(data), frame)
