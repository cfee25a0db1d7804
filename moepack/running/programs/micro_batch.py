"""Micro-batches: a prompt's tokens computed at once, for which nearly all experts are read."""

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

from moepack.common.keys import ExpertKey
from moepack.common.shape import ROUTED_FAMILY
from moepack.common.sizes import Size, align
from moepack.host.memory_limits import available_memory, memory_length
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.context import MOEPACK_RUN
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.running.pager.budget import step_length
from moepack.running.programs.beside_experts import beside_length, limit_earlier_texts
from moepack.running.programs.command import CONTEXT, experts_used, says_micro_batch

MICRO_BATCHES = tuple(2048 >> shift for shift in range(12))
"""Candidates, the largest first: more than 2,048 tokens gain little on processors."""
_USUAL = 512
"""llama.cpp's default."""
_MOST_COMPUTING = 8
"""For more than that default, computing may take an eighth of the memory."""


def server_options(
    pack: Pack, options: Sequence[str], memory: Size | None, pinned: Size
) -> tuple[list[str], int]:
    """Return options of llama-server, and the bytes that it takes beside experts at most.

    Limits of earlier texts and a micro-batch are among them if `options` and variables set none.
    """
    footprint = footprint_of(pack)
    words = [*options, *limit_earlier_texts(footprint, options)]
    beside = beside_length(footprint, words)
    if not says_micro_batch(options, os.environ):
        sizes: Any = {"context": CONTEXT.number(options, os.environ), "beside": beside}
        count = choose_micro_batch(pack, memory=memory, pinned=pinned, options=options, **sizes)
        words += ["-ub", str(count)]
    return words, beside


def choose_micro_batch(
    pack: Pack,
    *,
    context: int | None,
    memory: Size | None,
    pinned: Size,
    options: Sequence[str] = (),
    beside: int = 0,
) -> int:
    """Return the largest micro-batch that a context of so many tokens and memory allow.

    Without `context` it is the one that the model was trained for. `memory` is the bytes for
    experts, as in `PagerOptions`; `pinned` of them stay. `options` are llama-server's. The least
    memory, `floor`, is that of one token. Of the free memory `beside` bytes are not for experts.
    """
    available, limit = available_memory() - beside, memory_length(memory)
    if limit == "floor":
        return 1
    most = available if limit is None else limit
    used = experts_used(options, pack.manifest.source.architecture)
    for count in micro_batches(footprint_of(pack), context, available):
        if floor_length(pack, count, pinned, used) <= most:
            return count
    return 1


def micro_batches(footprint: Footprint, context: int | None, memory: int) -> Iterator[int]:
    """Yield micro-batches to try, the largest first, for a context of so many tokens.

    Those are left out whose computing would take too much of `memory` bytes, or an unknown part.
    """
    for count in MICRO_BATCHES:
        if context is not None and count // 2 >= context:
            continue
        options = MOEPACK_RUN._replace(token_count=context, batch_count=count)
        computing = footprint.compute_length(options)
        if count <= _USUAL or (computing is not None and computing <= memory // _MOST_COMPUTING):
            yield count


def floor_length(
    pack: Pack, micro_batch: int, pinned: Size, experts_used: int | None = None
) -> int:
    """Return the bytes that a pager needs: for a step, for a token beside it, and for pins.

    A token uses `experts_used` in each layer, by default as many as the model states.
    """
    shape, lengths = pack.shape.using(experts_used), dict(_slot_lengths(pack))
    options: Any = {"family": ROUTED_FAMILY, "layers": shape.without_mtp().routed}
    keys = pack.hottest(pack.budget_length(pinned, "pin", **options), **options)
    steps = step_length(shape, lengths, micro_batch) + step_length(shape, lengths, 1)
    return steps + sum(lengths[key] for key in keys)


def _slot_lengths(pack: Pack) -> Iterator[tuple[ExpertKey, int]]:
    """Yield the most bytes of each expert, in whole pages wherever it begins in a page."""
    for layer, family in pack.shape.routed.items():
        parts = pack.parts(layer)
        length = sum(align(part.length, mmap.PAGESIZE) + mmap.PAGESIZE for part in parts)
        yield from ((ExpertKey(layer, expert), length) for expert in range(family.expert_count))
