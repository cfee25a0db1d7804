"""Execution modes of a model: the reads of a token in each, the memory it takes, which fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.sizes import size_text
from moepack.planning.footprint.context import LLAMA_SERVER, MOEPACK_RUN, ContextOptions
from moepack.planning.footprint.model import Footprint
from moepack.planning.forecasting.measured_runs import MeasuredRun
from moepack.planning.forecasting.rates import KIND_WORDS, Kind, Reads
from moepack.planning.machine.model import Machine

MARGIN = 1 << 30
"""Bytes of each memory that are left to all else, as llama.cpp's `--fit-target` leaves them."""

MICRO_BATCHES: dict[Kind, int] = {
    "gpu": 512,
    "offload": 4096,
    "cpu": 512,
    "stream": 2048,
    "gpu-stream": 4096,
}
"""Tokens of a prompt that are computed at once: llama.cpp's default if all experts are there, else
as many as let a prompt read the experts once."""
_SMALLER = (2048, 1024, 512)
_TEXTS = 0.85
"""Tokens of n texts use as many experts of a layer as n^0.85 of a uniform router would: with the
routing of Qwen3-30B-A3B two 1.8 times those of one, four 3.1 times."""


class ExecutionMode(NamedTuple):
    """An execution mode: `cpu_layer_count` is N of `--n-cpu-moe N`, `budget` a cache's bytes.

    `vram_cache` is the bytes of a cache in VRAM, of experts that are computed there
    (`--moe-cache-mib`).
    """

    kind: Kind
    cpu_layer_count: int | None = None
    budget: int | None = None
    vram_cache: int | None = None

    def keeps_in_memory(self, layer: int) -> bool:
        """Return whether the experts of a layer are in memory: llama.cpp counts all blocks."""
        return self.cpu_layer_count is None or layer < self.cpu_layer_count


class ModelOnMachine:
    """A model on a machine, with a context of so many tokens: its reads and needs in each mode.

    `micro_batch` is how many tokens of a prompt are computed at once, by default as MICRO_BATCHES
    has it, or fewer if the machine has too little memory for them. A token of each of `text_count`
    texts is decoded at once. Raises RequestError for a model
    without experts and for a context that llama.cpp refuses.
    """

    def __init__(
        self,
        footprint: Footprint,
        machine: Machine,
        context: int,
        micro_batch: int | None = None,
        text_count: int = 1,
    ) -> None:
        self.footprint, self.machine, self.weights = footprint, machine, footprint.weights
        self._context = footprint.context(ContextOptions(context))
        self._token_count = context
        self.micro_batches = {
            kind: min(context, micro_batch or count) for kind, count in MICRO_BATCHES.items()
        }
        """Tokens of a prompt that are computed at once, by mode."""
        self.context_lengths: dict[Kind, int | None] = {}
        """The bytes of the context as engines make it, by mode; None is unknown."""
        self._compute_lengths: dict[Kind, int | None] = {}
        for kind in KIND_WORDS:
            self._measure(kind)
        self.layers = [layer for layer in self.weights.layers if layer.expert_length]
        """The layers with experts."""
        count = self.weights.shape.without_mtp().routed_count
        if not count:
            raise RequestError("the model has no routed experts", path=footprint.path)
        self.drive = machine.drive and machine.drive.step(self.weights.expert_length // count)
        """The speed of reading missing experts."""
        self.text_count = text_count
        self.step_length = self.step_of([one.layer for one in self.layers])
        """The bytes of the experts that a step of all texts uses in all layers; None is unknown."""
        if micro_batch is None:
            self._shrink_micro_batches()

    def _measure(self, kind: Kind) -> None:
        options = (MOEPACK_RUN if kind == "stream" else LLAMA_SERVER)._replace(
            token_count=self._token_count, batch_count=self.micro_batches[kind]
        )
        context = self.footprint.context(options)
        self.context_lengths[kind] = None if context is None else context.length
        self._compute_lengths[kind] = self.footprint.compute_length(options)

    def _shrink_micro_batches(self) -> None:
        last = self.offloads()[-1].cpu_layer_count
        for mode in (
            ExecutionMode("offload", last),
            ExecutionMode("gpu-stream", last, budget=0),
            ExecutionMode("stream", budget=self.step_length or 0),
        ):
            for smaller in _SMALLER:
                if self.fits(mode, has_memory=mode.kind != "stream") is not False:
                    break
                self.micro_batches[mode.kind] = min(smaller, self.micro_batches[mode.kind])
                self._measure(mode.kind)

    def cached_layers(self, mode: ExecutionMode) -> tuple[int, ...]:
        """Return the layers with experts that are not in VRAM for good."""
        return tuple(one.layer for one in self.layers if mode.keeps_in_memory(one.layer))

    def step_of(self, layers: Collection[int], text_count: int | None = None) -> int | None:
        """Return the bytes of the experts that a step uses in some layers; None if not known."""
        lengths = [one.used_expert_length for one in self.layers if one.layer in layers]
        if None in lengths:
            return None
        return round(
            self._times(text_count or self.text_count) * sum(length or 0 for length in lengths)
        )

    def _times(self, text_count: int) -> float:
        """Return how many times as many experts a step of so many texts uses as one of a text."""
        shape = self.weights.shape.without_mtp()
        used, count = shape.experts_used, max(shape.expert_counts.values())
        if not used or text_count == 1:
            return 1.0
        unused = 1 - min(used, count) / count
        return (1 - math.pow(unused, text_count**_TEXTS)) * count / used

    def reads(
        self, mode: ExecutionMode, missed: float, depth: float, uploaded: float = 0.0
    ) -> Reads | None:
        """Return the reads of a step after `depth` tokens, with `missed` bytes from the drive.

        A cache in VRAM misses `uploaded` bytes, if there is one. None if it is not known how many
        experts, or which other bytes, a token reads.
        """
        reads = self._reads(mode.kind, mode.keeps_in_memory, missed, depth, self.text_count)
        if reads is None or mode.vram_cache is None:
            return reads
        return reads._replace(vram=reads.vram + reads.memory, memory=0.0, link=uploaded)

    def read_by(self, run: MeasuredRun) -> Reads | None:
        """Return the reads of a token in a measured run."""
        return self._reads(run.kind, run.keeps_in_memory, run.read_length, run.depth, 1)

    def _reads(
        self, kind: Kind, keeps: Callable[[int], bool], missed: float, depth: float, text_count: int
    ) -> Reads | None:
        dense, used = self.weights.read_dense_length, self.weights.read_expert_length
        if dense is None or used is None:
            return None
        times, context = self._times(text_count), self._context
        rest = dense + (0 if context is None else text_count * context.read_length(round(depth)))
        layers = [one for one in self.layers if keeps(one.layer)]
        kept = times * sum(one.used_expert_length or 0 for one in layers)
        # As if each lookup missed as likely.
        hit_rate, families = 1 - min(1.0, missed / kept) if kept else 1.0, self.weights.shape.routed
        counts = (times * (families[one.layer].experts_used or 0) for one in layers)
        waits = sum(1 - hit_rate**count for count in counts)
        if kind in ("cpu", "stream"):  # which compute each text's token by itself, and read no less
            memory = rest + (text_count - 1) * dense + text_count * used
            return Reads(len(self.layers), waits, memory=memory, drive=missed)
        vram = rest + times * used - kept
        return Reads(len(self.layers), waits, vram=vram, memory=kept, drive=missed)

    def needs(self, mode: ExecutionMode) -> tuple[int, int] | None:
        """Return the bytes that a mode takes of VRAM and of memory; None if they are not known."""
        dense, outer = self.weights.dense_length, self.weights.outer
        context, computing = self.context_lengths[mode.kind], self._compute_lengths[mode.kind]
        if dense is None or outer is None or context is None or computing is None:
            return None
        rest = dense + context + computing
        kept = self.kept_length(mode)
        resident = kept if mode.budget is None else min(mode.budget, kept)
        if mode.kind in ("cpu", "stream"):
            return 0, rest + resident
        # Embeddings are looked up in memory, whatever is offloaded (llama-model.cpp, b11549).
        embeddings = outer.embedding_length
        tied = outer.output_length if outer.is_tied else 0
        on_gpu = rest - embeddings + tied + self.weights.expert_length - kept
        # For a prompt llama.cpp copies the used experts of a tensor into one as long as it, in the
        # GPU's compute buffer (op offload; one at a time, as its allocator shares it).
        staged = self.weights.staged_length if kept else 0
        return on_gpu + (mode.vram_cache or 0) + staged, embeddings + resident

    def fits(self, mode: ExecutionMode, *, has_memory: bool = False) -> bool | None:
        """Return whether the machine has what a mode takes, and a margin; None if it is not known.

        With `has_memory` it is taken to have as much memory as is needed beside VRAM.
        """
        needs = self.needs(mode)
        return None if needs is None else self._has(*needs, has_memory=has_memory)

    def _has(self, vram: int, memory: int, *, has_memory: bool = False) -> bool:
        free = sum(max(0, gpu.memory.value - MARGIN) for gpu in self.machine.gpus)
        needed = memory + vram if self.machine.is_unified else memory
        is_enough = has_memory or needed + MARGIN <= self.machine.memory.value
        return vram <= free and is_enough

    def kept_length(self, mode: ExecutionMode) -> int:
        """Return the bytes of experts that are not in VRAM for good."""
        return sum(one.expert_length for one in self.layers if mode.keeps_in_memory(one.layer))

    def offload(self, cpu_layer_count: int) -> ExecutionMode:
        """Return the mode with the experts of the first so many blocks in memory."""
        has_any = any(one.layer < cpu_layer_count for one in self.layers)
        return ExecutionMode("offload" if has_any else "gpu", cpu_layer_count)

    def offloads(self) -> list[ExecutionMode]:
        """Return every `--n-cpu-moe N` that makes a difference, from 0 to all layers."""
        return [self.offload(end) for end in (0, *(one.layer + 1 for one in self.layers))]

    def best(self, streams: ExecutionMode) -> ExecutionMode:
        """Return the fastest mode that fits: as little in memory as VRAM allows.

        If none fits, it is `streams`, with all the memory that is left for experts. Raises
        RequestError below the floor.
        """
        offloads = self.offloads() if self.machine.gpus else []
        for mode in [*offloads, ExecutionMode("cpu")]:
            fits, kept = self.fits(mode), self.kept_length(mode)
            if fits is None:  # then whether its experts alone fit
                fits = self._has(self.weights.expert_length - kept, kept)
            if fits:
                return mode
        vram, fixed = self.needs(streams._replace(budget=0)) or (0, 0)
        fixed += vram if self.machine.is_unified else 0
        step = self.step_of(self.cached_layers(streams)) or 0
        memory = int(self.machine.memory.value)
        left = memory - MARGIN - fixed
        if left < step:
            raise RequestError(
                "too little memory for this model",
                expected=f"{size_text(fixed + step + MARGIN)} ({size_text(fixed)} for all but "
                f"experts, {size_text(step)} experts of one token, {size_text(MARGIN)} for all "
                "else)",
                found=size_text(memory),
                hint=f"{size_text(step - left)} are missing",
            )
        return streams._replace(budget=min(left, self.kept_length(streams)))

    def stream(self) -> ExecutionMode:
        """Return the mode with experts from the drive, and as much in VRAM as fits there.

        Dense weights come first, then the experts of as many layers as fit: those need no memory.
        In unified memory they would: all of it is for a cache.
        """
        layers = self.layers[-1:] if self.machine.is_unified else self.layers
        for end in (one.layer + 1 for one in layers if self.machine.gpus):
            mode = ExecutionMode("gpu-stream", end, budget=0)
            if self.fits(mode, has_memory=True):
                return mode
        return ExecutionMode("stream", budget=0)
