"""The memory of llama.cpp's server by part, and the options that it decides.

Nearly all experts are read for a micro-batch, the tokens of a prompt that are computed at once.

The server keeps earlier texts for prompts that begin like them. If another text takes the place of
one, the whole of it is kept, within `--cache-ram`, by default 8 GiB: the oldest are evicted first,
and a longer one is not kept at all. Each slot keeps copies of its windows and states too, up to
`--ctx-checkpoints`, by default 32, one or two for each prompt: they are 75 MiB of Qwen3-Next-80B,
200 of Gemma-4-26B (server-context.cpp and server-task.cpp of b11549, and tried).

Without `-np` there are four slots that share all cells of a context; with it they divide it, unless
`-kvu` has them share it (b11549's log).
"""

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from moepack.common.errors import RequestError
from moepack.common.shape import ROUTED_FAMILY, ExpertKey
from moepack.common.sizes import Size, align, count_text, size_text
from moepack.host.memory_limits import available_memory, memory_length
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.context import MOEPACK_RUN, ContextOptions
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.running.programs.command import (
    CONTEXT,
    SLOTS,
    USUAL_SLOTS,
    Option,
    experts_used,
    micro_batch,
    says_micro_batch,
)
from moepack.running.serving.drafts import draft_parts
from moepack.running.streaming.budget import MemoryParts, step_length
from moepack.running.streaming.supervisor import dense_length

USUAL_CONTEXT = 4096
"""The least tokens of a context that is chosen, if the model was trained for as many."""
MICRO_BATCHES = tuple(2048 >> shift for shift in range(12))
"""Candidates, the largest first: more than 2,048 tokens gain little on processors."""
_USUAL = 512
"""llama.cpp's default."""
_MOST_COMPUTING = 8
"""Above that default, computing may take an eighth of the memory."""
_CONTEXT_SHARE, _WANTED_SHARE = 8, 2
"""A chosen context takes an eighth of the memory at most; half of it for tokens that are wanted."""
_CONTEXT_STEP = 1024
_CACHE = Option("-cram --cache-ram", "LLAMA_ARG_CACHE_RAM")
_CHECKPOINTS = Option("-ctxcp --ctx-checkpoints --swa-checkpoints", "LLAMA_ARG_CTX_CHECKPOINTS")
_SHARED = Option("-kvu --kv-unified", "LLAMA_ARG_KV_UNIFIED")
_PER_SLOT = Option("--kv-unified-per-slot", "LLAMA_ARG_KV_UNIFIED_PER_SLOT")
_TYPE_K = Option("-ctk --cache-type-k", "LLAMA_ARG_CACHE_TYPE_K")
_TYPE_V = Option("-ctv --cache-type-v", "LLAMA_ARG_CACHE_TYPE_V")
_WINDOWS_IN_FULL = Option("--swa-full", "LLAMA_ARG_SWA_FULL")
_FLASH = Option("-fa --flash-attn", "LLAMA_ARG_FLASH_ATTN")
_OFF = {"off", "0", "false", "disabled"}
_MOST_CHECKPOINTS = 32
"""llama.cpp's default."""
_LEAST_CHECKPOINTS = 2
"""With these the last prompt can be changed or answered again."""
_MIB = 1 << 20
_LEAST_CACHE = 64 * _MIB
_SHARE = 16
"""A sixteenth of the memory is for whole texts at most, and another for checkpoints."""

_PROGRAM_LENGTH = 68 * _MIB
"""Of two processes of Python with their libraries, measured: 30 to 40 MiB for each."""
_HEADER_COPIES = 11
"""The bytes that llama.cpp takes for each of a header's, nearly all of which are a vocabulary."""
_EXPERT_LENGTH = 2048
"""For the places of an expert, in both processes."""
_TABLES, _ADDRESSES = 128, 512
"""A part of the memory for experts, and of the addresses of all, is tables of the kernel."""


class MemoryLimits(NamedTuple):
    """The memory for experts, or for all together, and the part of it for pinned experts.

    `memory` is as in `StreamingOptions`, `total` bytes, or a share of this machine's memory.
    """

    memory: Size | None = None
    total: Size | None = None
    pinned: Size = 0

    def checked(self) -> "MemoryLimits":
        """Return these with lengths in bytes. Raises RequestError for both limits, and no sizes."""
        if self.memory is not None and self.total is not None:
            hint = "`memory` is for experts alone, and `total_memory` for all of the model"
            raise RequestError("`memory` and `total_memory` at once", hint=hint)
        total = memory_length(self.total)
        if total == "floor":
            raise RequestError("not a size", argument="total_memory", found=total)
        return MemoryLimits(memory_length(self.memory), total, self.pinned)


NO_LIMITS = MemoryLimits()


class ServerMemory:
    """The memory of the server for `pack` by part, and options that it decides.

    Raises RequestError for drafts that there would not be, and what reading metadata raises.
    """

    def __init__(self, pack: Pack, limits: MemoryLimits) -> None:
        self._pack, self._footprint = pack, footprint_of(pack)
        self._limits = limits.checked()
        total = self._limits.total
        self._available = available_memory() if total is None else int(total)
        """All that there is: as given, or free."""

    def parts(self, command: Sequence[str]) -> MemoryParts:
        """Return what the server takes with a command, but for experts."""
        return self._without_texts(command)._replace(texts=self.earlier_texts(command)[1])

    def _without_texts(self, command: Sequence[str]) -> MemoryParts:
        options = context_options(command)
        context = self._footprint.context(options)
        drafts = draft_parts(self._footprint, command, options)
        return MemoryParts(
            dense=_sum(dense_length(self._pack), drafts.dense),
            context=_sum(context and context.length, drafts.context),
            computing=_sum(self._footprint.compute_length(options), drafts.computing),
            program=self._program_length(),
            token_count=context and context.token_count,
        )

    def _program_length(self) -> int:
        shape = self._pack.shape
        count = sum(family.expert_count for family in shape.families)
        headers = sum(shard.header_length for shard in self._pack.manifest.source.shards)
        whole = shape.expert_length
        tables = min(whole, self._experts_length() or self._available) // _TABLES
        tables += whole // _ADDRESSES
        return _PROGRAM_LENGTH + _HEADER_COPIES * headers + _EXPERT_LENGTH * count + tables

    def _experts_length(self) -> int | None:
        """Return the bytes for experts that were given."""
        memory = self._limits.memory
        return 0 if memory == "floor" else None if memory is None else int(memory)

    def context(self, command: Sequence[str], aim: int = 0) -> int:
        """Return the tokens of a context, for a command that sets none.

        They are the model's own, within an eighth of the memory, or what all experts leave of it;
        `aim` ones may take half. But they are at least `USUAL_CONTEXT`, if the model was trained
        for as many, whatever there is.
        """
        trained = self._pack.manifest.source.context_length or None
        if trained is None or self._footprint.attention is None:
            return min(USUAL_CONTEXT, trained or USUAL_CONTEXT)
        options = context_options(command)
        most = trained * (1 if options.is_unified else options.sequence_count)
        counts = [*range(_CONTEXT_STEP, most, _CONTEXT_STEP), most]

        def fitting(length: int) -> int:
            number = bisect_right(counts, length, key=partial(self._context_length, command))
            return counts[number - 1] if number else 0

        limit = self._experts_length()
        memory = self._available if limit is None else limit
        beside = 0 if limit is not None else self.parts([*command, "-c", str(_CONTEXT_STEP)]).beside
        left = memory - beside - self._pack.shape.expert_length
        count = max(min(USUAL_CONTEXT, most), fitting(max(memory // _CONTEXT_SHARE, left)))
        return max(count, min(aim, fitting((self._available - (limit or 0)) // _WANTED_SHARE)))

    def _context_length(self, command: Sequence[str], count: int) -> int:
        options = context_options(command)._replace(token_count=count)
        context = self._footprint.context(options)
        drafts = draft_parts(self._footprint, command, options).context
        return (context.length if context else 0) + (drafts or 0)

    def micro_batch(self, command: Sequence[str]) -> int:
        """Return the largest micro-batch that memory allows; `floor` is enough for one token."""
        limit = self._limits.memory
        if limit == "floor":
            return 1
        for count in micro_batches(self._footprint, CONTEXT.number(command), self._available):
            most = limit
            if most is None:
                most = self._available - self.parts([*command, "-ub", str(count)]).beside
            if self._floor(command, count) <= int(most):
                return count
        return 1

    def experts(self, command: Sequence[str]) -> Size | None:
        """Return the memory for experts, as in `StreamingOptions`.

        Raises RequestError for a total that is too small.
        """
        if self._limits.total is None:
            return self._limits.memory
        parts = self.parts(command)
        floor = self._floor(command, micro_batch(command))
        least = parts._replace(experts=floor)
        if least.total is None:
            problem = "the memory of this model is not known in all"
            raise RequestError(
                problem, path=self._pack.path, hint="limit that of experts: `memory`"
            )
        if least.total > self._available:
            raise RequestError(
                "too little memory for all of the model",
                argument="total_memory",
                expected=f"at least {size_text(least.total)}: {parts_text(least)}",
                found=size_text(self._available),
                hint="give more `total_memory`, or a shorter `context`",
            )
        return self._available - parts.beside

    def _floor(self, command: Sequence[str], count: int) -> int:
        used = experts_used(command, self._pack.manifest.source.architecture)
        return floor_length(self._pack, count, self._limits.pinned, used)

    def earlier_texts(self, command: Sequence[str]) -> tuple[list[str], int]:
        """Return options that limit what a server keeps of earlier texts, and the bytes of these.

        Options that the command or a variable sets are left out. The cache has space for texts that
        fill one context together: for a conversation while another prompt takes its place.
        """
        least, share = _LEAST_CACHE, max(_LEAST_CACHE, self._available // _SHARE)
        if self._limits.total is not None:  # of what the least of all else leaves
            command = command if says_micro_batch(command) else [*command, "-ub", "1"]
            needed = self._without_texts(command).beside
            needed += self._floor(command, micro_batch(command))
            share = max(0, self._available - needed) // _SHARE
            least = min(least, share)
        options = context_options(command)._replace(sequence_count=1, has_checkpoint=True)
        context = self._footprint.context(options)
        whole = context.length if context else 0
        checkpoint = sum(layer.checkpoint_length for layer in context.layers) if context else 0
        slots = text_count(command)
        words: list[str] = []
        count = _CHECKPOINTS.integer(command)
        if count is None:
            count = _MOST_CHECKPOINTS
            if checkpoint:
                count = min(count, max(_LEAST_CHECKPOINTS, share // (slots * checkpoint)))
                words = ["--ctx-checkpoints", str(count)]
        kept = slots * max(0, count) * checkpoint
        cache = _CACHE.integer(command)
        if cache is None:
            length = min(share, max(least, whole + max(0, count) * checkpoint))
            cache = max(1, length // _MIB)
            words += ["--cache-ram", str(cache)]
        cached = cache * _MIB if cache >= 0 else whole  # without a limit it is one of tokens
        return words, cached + kept


def context_options(command: Sequence[str]) -> ContextOptions:
    """Return the context that a command of llama-server has."""
    slots = SLOTS.number(command)
    per_slot = None if CONTEXT.is_set(command) else _PER_SLOT.number(command)
    return ContextOptions(
        CONTEXT.number(command) or (per_slot and per_slot * (slots or USUAL_SLOTS)),
        type_k=_TYPE_K.text(command) or "f16",
        type_v=_TYPE_V.text(command) or "f16",
        batch_count=micro_batch(command),
        sequence_count=slots or USUAL_SLOTS,
        is_unified=slots is None or _SHARED.is_set(command),
        has_flash_attention=_FLASH.text(command) not in _OFF,
        swa_full=_WINDOWS_IN_FULL.is_set(command),
    )


def text_count(command: Sequence[str]) -> int:
    """Return the most texts that a command of llama-server computes at once."""
    return SLOTS.number(command) or USUAL_SLOTS


def sets_context(command: Sequence[str]) -> bool:
    """Return whether a command sets the length of its context."""
    return CONTEXT.is_set(command) or _PER_SLOT.is_set(command)


def divided_text(command: Sequence[str]) -> str | None:
    """Return a sentence about a context that texts divide; None if all of them share it."""
    options = context_options(command)
    count = options.sequence_count
    if options.is_unified or count == 1 or options.token_count is None:
        return None
    tokens = count_text(options.token_count // count, "token")
    return f"each of {count} texts has {tokens} of the context; -kvu lets them share it"


def parts_text(parts: MemoryParts) -> str:
    """Return the parts of the memory as a list, for people; unknown ones are left out."""
    count = "" if parts.token_count is None else f" of {count_text(parts.token_count, 'token')}"
    named = {
        "experts": parts.experts,
        "dense weights": parts.dense,
        f"context{count}": parts.context,
        "computing": parts.computing,
        "earlier texts": parts.texts,
        "the programs": parts.program,
    }
    return ", ".join(f"{name} {size_text(one)}" for name, one in named.items() if one is not None)


def micro_batches(footprint: Footprint, context: int | None, memory: int) -> Iterator[int]:
    """Yield micro-batches to try for a context of `context` tokens, the largest first.

    By default the context is that of the training. Above llama.cpp's default, computing must take
    no more than a fixed share of `memory` bytes.
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
    """Return the bytes that experts need: for a step, for a token beside it, and for pins.

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


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second
