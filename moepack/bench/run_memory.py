"""The division of a limit on all memory between experts and the rest."""

from __future__ import annotations

from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.shape import is_row_table
from moepack.common.sizes import size_text
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.context import MOEPACK_RUN, ContextOptions
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.running.programs.micro_batch import floor_length, micro_batches

PROGRAM_LENGTH = 256 << 20
"""Bytes that `moepack run` takes beside the model and its context: two processes of Python, each
30 to 45 MiB, llama.cpp's code, up to 128 MiB of read buffers, and page tables."""


class RunMemory(NamedTuple):
    """The bytes for experts, and the tokens of a prompt computed at once."""

    experts: int
    micro_batch: int


def divide_memory(
    pack: Pack, limit: int, *, context: int, pinned: int, micro_batch: int | None = None
) -> RunMemory:
    """Divide a `limit` on all bytes that `moepack run` takes.

    Dense tensors count, which lie in the page cache, and a context of so many tokens; tables that
    are looked up by row do not. `pinned` bytes of the hottest experts stay in memory. Without a
    `micro_batch` the longest that fits is chosen. Raises RequestError if the experts of one
    micro-batch do not fit, and what reading metadata raises.
    """
    dense = sum(one.length for one in pack.dense() if not is_row_table(one.name))
    footprint = footprint_of(pack.path)
    counts = micro_batches(footprint, context, limit) if micro_batch is None else (micro_batch,)
    for count in counts:
        computing = _context_length(footprint, context, count)
        experts = limit - PROGRAM_LENGTH - dense - computing
        least = floor_length(pack, count, pinned)
        if experts >= least:
            return RunMemory(experts, count)
    raise RequestError(
        "too little memory to run the model",
        expected=f"{size_text(PROGRAM_LENGTH + dense + computing + least)} "
        f"({size_text(PROGRAM_LENGTH)} the programs, {size_text(dense)} dense, "
        f"{size_text(computing)} the context, {size_text(least)} experts)",
        found=size_text(limit),
    )


def _context_length(footprint: Footprint, context: int, micro_batch: int) -> int:
    """Return the bytes of a context and its compute buffers, as far as they are known."""
    options: ContextOptions = MOEPACK_RUN._replace(token_count=context, batch_count=micro_batch)
    cells = footprint.context(options)
    return (0 if cells is None else cells.length) + (footprint.compute_length(options) or 0)
