"""Options of llama.cpp's server by memory: its context, its micro-batch, and earlier texts.

Nearly all experts are read for a micro-batch, the tokens of a prompt that are computed at once.

The server keeps earlier texts for prompts that begin like them. If another text takes the place of
one, the whole of it is kept, within `--cache-ram`, by default 8 GiB: the oldest are evicted first,
and a longer one is not kept at all. Each slot keeps copies of its windows and states too, up to
`--ctx-checkpoints`, by default 32, one or two for each prompt: they are 75 MiB of Qwen3-Next-80B,
200 of Gemma-4-26B (server-context.cpp and server-task.cpp of b11549, and tried).
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moepack.common.errors import RequestError
from moepack.common.shape import ROUTED_FAMILY, ExpertKey
from moepack.common.sizes import Size, align, count_text, divide_up
from moepack.host.memory_limits import available_memory, memory_length
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.context import MOEPACK_RUN
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.running.pager.budget import step_length
from moepack.running.programs.command import (
    CONTEXT,
    Option,
    experts_used,
    says_micro_batch,
    single_text_options,
)

USUAL_CONTEXT = 4096
"""The default."""
MICRO_BATCHES = tuple(2048 >> shift for shift in range(12))
"""Candidates, the largest first: more than 2,048 tokens gain little on processors."""
_USUAL = 512
"""llama.cpp's default."""
_MOST_COMPUTING = 8
"""Above that default, computing may take an eighth of the memory."""
_CACHE = Option(frozenset({"-cram", "--cache-ram"}), "LLAMA_ARG_CACHE_RAM")
_CHECKPOINTS = Option(
    frozenset({"-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"}), "LLAMA_ARG_CTX_CHECKPOINTS"
)
_SLOTS = Option(frozenset({"-np", "--parallel"}), "LLAMA_ARG_N_PARALLEL")
_DEFAULT_CACHE, _MOST_CHECKPOINTS, _DEFAULT_SLOTS = 8192, 32, 4
"""llama.cpp's defaults, the first in MiB."""
_LEAST_CHECKPOINTS = 2
"""With these the last prompt can be changed or answered again."""
_MIB = 1 << 20
_LEAST_CACHE = 64 * _MIB
_SHARE = 16
"""A sixteenth of the free memory is for whole texts at most, and another for checkpoints."""


def choose_context(
    pack: Pack, length: int | None, notice: Callable[[str], None] = lambda text: None
) -> int:
    """Return the tokens of a context: `length`, or for 0 the context of the model's training.

    None is `USUAL_CONTEXT`, or the training's if it is shorter. `notice` is called with a sentence
    about a context that is longer. Raises RequestError for 0 if the training's is unknown.
    """
    trained = pack.manifest.source.context_length or None
    if length is None:
        return min(USUAL_CONTEXT, trained or USUAL_CONTEXT)
    if length == 0 and trained is None:
        problem = "the model does not state its trained context length"
        raise RequestError(problem, path=pack.path, hint="set it: `context=4096`")
    if trained is not None and length > trained:
        tokens = count_text(trained, "token")
        notice(f"the model was trained for {tokens} of context, and uses no more")
    return length or trained or USUAL_CONTEXT


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
        limits: Any = {"memory": memory, "pinned": pinned, "options": options}
        count = choose_micro_batch(pack, footprint, **limits, **sizes)
        words += ["-ub", str(count)]
    return words, beside


def single_text_server(
    pack: Pack,
    options: Sequence[str],
    memory: Size | None,
    pinned: Size,
    *,
    context: int,
    threads: int | None,
    micro_batch: int | None,
) -> tuple[list[str], int, int]:
    """Return options of llama-server for one text at a time, before its other `options`.

    With them come the micro-batch, which is chosen by memory if None, and the most bytes that the
    server takes beside experts.
    """
    footprint = footprint_of(pack)
    few = [*single_text_options(context, threads, micro_batch or 1), *options]
    limits = limit_earlier_texts(footprint, few)
    beside = beside_length(footprint, [*few, *limits])
    if micro_batch is None:
        sizes: Any = {"context": context, "pinned": pinned, "beside": beside}
        micro_batch = choose_micro_batch(pack, footprint, memory=memory, options=options, **sizes)
    words = [*single_text_options(context, threads, micro_batch), *limits, *options]
    return words, micro_batch, beside


def choose_micro_batch(
    pack: Pack,
    footprint: Footprint,
    *,
    context: int | None,
    memory: Size | None,
    pinned: Size,
    options: Sequence[str] = (),
    beside: int = 0,
) -> int:
    """Return the largest micro-batch that memory allows with a context of `context` tokens.

    `footprint` is the model's. By default the context is the one of its training. `memory` is the
    bytes for experts, as in `PagerOptions`, of which `pinned` stay; `floor` is enough for one
    token. `options` are llama-server's. `beside` bytes of the free memory are not for experts.
    """
    available, limit = available_memory() - beside, memory_length(memory)
    if limit == "floor":
        return 1
    most = available if limit is None else limit
    used = experts_used(options, pack.manifest.source.architecture)
    for count in micro_batches(footprint, context, available):
        if floor_length(pack, count, pinned, used) <= most:
            return count
    return 1


def micro_batches(footprint: Footprint, context: int | None, memory: int) -> Iterator[int]:
    """Yield micro-batches to try for a context of `context` tokens, the largest first.

    Above llama.cpp's default, computing must take no more than a fixed share of `memory` bytes.
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

    A token uses `experts_used` in each layer, by default the model's own number.
    """
    shape = pack.shape.using(experts_used)
    lengths: dict[ExpertKey, int] = {}
    for layer, family in pack.shape.routed.items():  # whole pages, wherever a part begins in a page
        parts = pack.parts(layer)
        length = sum(align(part.length, mmap.PAGESIZE) + mmap.PAGESIZE for part in parts)
        lengths |= {ExpertKey(layer, expert): length for expert in range(family.expert_count)}
    options: Any = {"family": ROUTED_FAMILY, "layers": shape.without_mtp().routed}
    keys = pack.hottest(pack.budget_length(pinned, "pin", **options), **options)
    steps = step_length(shape, lengths, micro_batch) + step_length(shape, lengths, 1)
    return steps + sum(lengths[key] for key in keys)


def limit_earlier_texts(footprint: Footprint, command: Sequence[str]) -> list[str]:
    """Return options of llama-server that limit what it keeps of earlier texts.

    Options that the command or a variable sets are left out. The cache has space for texts that
    fill one context together: for a conversation while another prompt takes its place.
    """
    share = max(_LEAST_CACHE, available_memory() // _SHARE)
    whole, checkpoint = _lengths(footprint, command)
    count, words = _MOST_CHECKPOINTS, []
    if checkpoint and not _CHECKPOINTS.is_set(command, os.environ):
        fitting = share // (_slots(command) * checkpoint)
        count = min(_MOST_CHECKPOINTS, max(_LEAST_CHECKPOINTS, fitting))
        words = ["--ctx-checkpoints", str(count)]
    if not _CACHE.is_set(command, os.environ):
        length = min(share, max(_LEAST_CACHE, whole + count * checkpoint))
        words += ["--cache-ram", str(divide_up(length, _MIB))]
    return words


def beside_length(footprint: Footprint, command: Sequence[str]) -> int:
    """Return the most bytes, beside experts, by which a server grows after its start.

    They are the dense weights that each token reads, in the page cache, which counts as free, and
    earlier texts.
    """
    whole, checkpoint = _lengths(footprint, command)
    cache = _CACHE.integer(command, os.environ)
    if cache is None:
        cache = _DEFAULT_CACHE
    cached = cache * _MIB if cache >= 0 else whole  # without a limit it is one of tokens
    count = _CHECKPOINTS.integer(command, os.environ)
    count = _MOST_CHECKPOINTS if count is None else max(0, count)
    dense = footprint.weights.read_dense_length or 0
    return dense + cached + _slots(command) * count * checkpoint


def _lengths(footprint: Footprint, command: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of a full context, and of a checkpoint; 0 if unknown."""
    count = CONTEXT.number(command, os.environ)
    context = footprint.context(MOEPACK_RUN._replace(token_count=count))
    if context is None:
        return 0, 0
    return context.length, sum(layer.checkpoint_length for layer in context.layers)


def _slots(command: Sequence[str]) -> int:
    count = _SLOTS.integer(command, os.environ)
    return count if count is not None and count > 0 else _DEFAULT_SLOTS
