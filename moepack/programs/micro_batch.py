"""How many tokens of a prompt are computed at once: each time nearly all experts are read."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

from moepack.footprint.context import MOEPACK_RUN
from moepack.footprint.model import Footprint, footprint_of
from moepack.keys import ExpertKey
from moepack.machine.memory_limits import available_memory, memory_length
from moepack.pager.budget import step_length
from moepack.programs.command import context_length, says_micro_batch
from moepack.reading.pack import Pack
from moepack.shape import ROUTED_FAMILY
from moepack.sizes import Size, align

MICRO_BATCHES = tuple(2048 >> shift for shift in range(12))
"""What is tried, the most first: more than 2,048 tokens gain little on processors."""
_USUAL = 512
"""llama.cpp's default."""
_MOST_COMPUTING = 8
"""For more than that default, computing may take an eighth of what memory there is."""


def server_options(
    pack: Pack, options: Sequence[str], memory: Size | None, pinned: Size
) -> list[str]:
    """Return options of llama-server, with a micro-batch where they and variables say none."""
    if says_micro_batch(options, os.environ):
        return list(options)
    context = context_length(options, os.environ)
    count = choose_micro_batch(pack, context=context, memory=memory, pinned=pinned)
    return [*options, "-ub", str(count)]


def choose_micro_batch(
    pack: Pack, *, context: int | None, memory: Size | None, pinned: Size
) -> int:
    """Return the largest micro-batch that a context of so many tokens and memory allow.

    Without `context` it is what the model was trained for. `memory` is the bytes for experts, as in
    `PagerOptions`; `pinned` of them stay.
    """
    footprint = footprint_of(pack.path)
    available, limit = available_memory(), memory_length(memory)
    for count in micro_batches(footprint, context, available):
        room = available if limit is None else limit
        if room == "floor" or floor_length(pack, count, pinned) <= room:
            return count
    return 1


def micro_batches(footprint: Footprint, context: int | None, memory: int) -> Iterator[int]:
    """Yield micro-batches to try, the largest first, for a context of so many tokens.

    Those are left out whose computing would take too much of `memory` bytes, or nobody knows how
    much.
    """
    for count in MICRO_BATCHES:
        if context is not None and count // 2 >= context:
            continue
        options = MOEPACK_RUN._replace(token_count=context, batch_count=count)
        computing = footprint.compute_length(options)
        if count <= _USUAL or (computing is not None and computing <= memory // _MOST_COMPUTING):
            yield count


def floor_length(pack: Pack, micro_batch: int, pinned: Size) -> int:
    """Return the bytes that a pager needs: for a step, for a token beside it, and for pins."""
    shape = pack.shape.without_mtp()
    rooms = dict(_rooms(pack))
    options: Any = {"family": ROUTED_FAMILY, "layers": shape.routed}
    keys = pack.hottest(pack.budget_length(pinned, "pin", **options), **options)
    steps = step_length(shape, rooms, micro_batch) + step_length(shape, rooms, 1)
    return steps + sum(rooms[key] for key in keys)


def _rooms(pack: Pack) -> Iterator[tuple[ExpertKey, int]]:
    """Yield the bytes that experts take at most, in whole pages wherever they begin in a page."""
    for layer, family in pack.shape.without_mtp().routed.items():
        parts = pack.parts(layer)
        room = sum(align(part.length, mmap.PAGESIZE) + mmap.PAGESIZE for part in parts)
        yield from ((ExpertKey(layer, expert), room) for expert in range(family.expert_count))
