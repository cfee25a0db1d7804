"""One stock GGUF of a whole pack, which llama.cpp loads as any other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moepack.common import digest
from moepack.common.errors import RequestError
from moepack.common.phases import Progress
from moepack.common.sizes import size_text
from moepack.pack.engines.gguf_layout import GgufLayout, lay_out
from moepack.pack.reading.pack import Pack
from moepack.storage.extents import Extent, NewFile
from moepack.storage.whole_files import write_whole_files

ALIGNMENT = 4096
MAX_ALIGNMENT = 1 << 21


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """The file that was exported, and how; lengths in bytes.

    `cloned_length` is shared with the pack, `kept_length` was there from an interrupted run.
    `has_digests` if every part was compared with its digest.
    """

    path: str
    tensor_count: int
    alignment: int
    length: int
    cloned_length: int
    kept_length: int
    has_digests: bool


def export_gguf(
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    alignment: int = ALIGNMENT,
    resume: bool = False,
    force: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
) -> ExportSummary:
    """Write the model of a whole pack as one GGUF that stock llama.cpp loads.

    Metadata is the source's, without the keys of a split model, and with `alignment` (bytes) for
    all tensors. Every part whose digest is known is compared with it on the way; ranges are shared
    with the pack if the file system can. With `resume` an interrupted run is continued, with
    `force` a file at `target` is replaced. `progress` is as for `restore`.

    Raises PackError if the pack is not whole or its bytes are wrong, RequestError for an existing
    file, MachineError if the file cannot be written.
    """
    if alignment.bit_count() != 1 or not 32 <= alignment <= MAX_ALIGNMENT:
        expected = f"a power of two from 32 B to {size_text(MAX_ALIGNMENT)}"
        raise RequestError("not an alignment", expected=expected, found=f"{alignment:,} bytes")
    path = Path(target)
    with Pack(pack) as opened:
        layout = lay_out(opened, alignment)
        has_digests = all(file.has_digests for file in opened.index.files)
        extents = partial(_extents, layout, len(opened.file_paths))
        result = write_whole_files(
            path.parent,
            [NewFile(path.name, layout.length, extents)],
            opened.file_paths,
            data=(layout.header,),
            resume=resume,
            force=force,
            threads=threads,
            progress=progress,
        )
    return ExportSummary(
        path=os.fspath(target),
        tensor_count=len(layout.dense) + len(layout.experts),
        alignment=alignment,
        length=result.length,
        cloned_length=result.cloned_length,
        kept_length=result.kept_length,
        has_digests=has_digests,
    )


def _extents(layout: GgufLayout, header_input: int) -> Iterator[Extent]:
    """Yield the header, which is input `header_input`, and all tensors by their offsets."""
    yield Extent(0, len(layout.header), header_input, 0, digest.xxh3(layout.header), "header")
    for tensor in (*layout.dense, *layout.experts):
        yield from tensor.extents
