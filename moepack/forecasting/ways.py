"""Ways of running a model: what a token reads in each, what it takes, which of them fits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from moepack.errors import RequestError
from moepack.footprint.context import LLAMA_SERVER, MOEPACK_RUN, ContextOptions
from moepack.footprint.model import footprint_of
from moepack.footprint.weights import LayerWeights
from moepack.forecasting.reads import Kind, Reads
from moepack.forecasting.receipts import Receipt
from moepack.machine.model import Figure, Machine
from moepack.paths import PathOrPaths, listed
from moepack.reading.directory import named_pack
from moepack.sizes import size_text

MARGIN = 1 << 30
"""Bytes of each memory that are left to all else, as llama.cpp's `--fit-target` leaves them."""

_ENDLESS = Figure(1e18, "typed")
_SLICE_COUNT = 3
"""Gate, up and down: what is read of a source for an expert, where a pack has one blob."""


_CONTEXTS: dict[Kind, ContextOptions] = {
    "gpu": LLAMA_SERVER,
    "offload": LLAMA_SERVER,
    "cpu": LLAMA_SERVER,
    "stream": MOEPACK_RUN,
    "gpu-stream": LLAMA_SERVER,
}
"""What engines that run so make a context for."""


MICRO_BATCHES: dict[Kind, int] = {
    "gpu": 512,
    "offload": 4096,
    "cpu": 512,
    "stream": 2048,
    "gpu-stream": 4096,
}
"""Tokens of a prompt that are computed at once: llama.cpp's default where nothing comes to them,
and where experts do, as many as let a prompt read them once."""
_SMALLER = (2048, 1024, 512)


class Way(NamedTuple):
    """A way of running: `cpu_layer_count` is N of `--n-cpu-moe N`, `budget` a cache's bytes.

    `vram_cache` is the bytes of a cache in VRAM, of experts that are computed there
    (`--moe-cache-mib`).
    """

    kind: Kind
    cpu_layer_count: int | None = None
    budget: int | None = None
    vram_cache: int | None = None

    def keeps_in_memory(self, layer: int) -> bool:
        """Say whether the experts of a layer are in memory: llama.cpp counts all blocks."""
        return self.cpu_layer_count is None or layer < self.cpu_layer_count


class Needs(NamedTuple):
    """What a way takes of VRAM and of memory, in bytes; None where it is not known."""

    vram: int | None
    memory: int | None

    def fit(self, machine: Machine) -> bool | None:
        """Say whether a machine has that, and a margin; None where it is not known."""
        if self.vram is None or self.memory is None:
            return None
        vram = sum(max(0, gpu.memory.value - MARGIN) for gpu in machine.gpus)
        return self.vram <= vram and self.memory + MARGIN <= machine.memory.value


class Model:
    """A model to be run, with room for so many tokens.

    `paths` is a source or a pack. `micro_batch` is how many tokens of a prompt are computed at
    once, by default as MICRO_BATCHES has it. Raises what opening it does, and RequestError for a
    model without experts and for a context that llama.cpp refuses.
    """

    def __init__(self, paths: PathOrPaths, context: int, micro_batch: int | None = None) -> None:
        self.path = str(listed(paths)[0])
        footprint = footprint_of(paths)
        self.weights = footprint.weights
        self._context = footprint.context(ContextOptions(context))
        self._footprint, self._token_count = footprint, context
        self._is_stated = micro_batch is not None
        self._micro_batches = {
            kind: min(context, micro_batch or count) for kind, count in MICRO_BATCHES.items()
        }
        self._lengths = {kind: self._taken(kind) for kind in _CONTEXTS}
        self.layers: list[LayerWeights] = [
            layer for layer in self.weights.layers if layer.expert_length
        ]
        """Those with experts."""
        count = self.weights.shape.without_mtp().routed_count
        if not count:
            raise RequestError("the model has no experts that a router chooses", path=self.path)
        length = self.weights.expert_length // count
        self.read_length = length if named_pack(paths) else length // _SLICE_COUNT
        """Bytes of a read of an expert from the drive."""

    def context_length(self, kind: Kind) -> int | None:
        """Return the bytes of the context as engines have it; None where it is not known."""
        lengths = self._lengths[kind]
        return None if lengths is None else lengths[0]

    def prompt_operations(self, count: int) -> float | None:
        """Return the operations that a prompt takes; None where it is not known.

        Two for each active parameter and token, a product and a sum, and those of attention.
        """
        counted, attention = self.weights.parameters, self._footprint.attention
        if counted is None or counted.active is None:
            return None
        attending = 0.0 if attention is None else attention.operations(count)
        return 2.0 * counted.active * count + attending

    def micro_batch(self, kind: Kind) -> int:
        """Return how many tokens of a prompt are computed at once."""
        return self._micro_batches[kind]

    def fit_micro_batches(self, machine: Machine) -> None:
        """Choose smaller micro-batches where a machine has no room for them otherwise.

        Those that were asked for stay as they are.
        """
        endless = machine._replace(memory=_ENDLESS)
        last = self.offloads()[-1].cpu_layer_count
        ways = [
            (Way("offload", last), endless),
            (Way("gpu-stream", last, budget=0), endless),
            (Way("stream", budget=self.step_length or 0), machine),
        ]
        for way, room in ways:
            for smaller in () if self._is_stated else _SMALLER:
                if self.needs(way).fit(room) is not False:
                    break
                self._micro_batches[way.kind] = min(smaller, self._micro_batches[way.kind])
                self._lengths[way.kind] = self._taken(way.kind)

    def _taken(self, kind: Kind) -> tuple[int, int] | None:
        """Return the bytes of a context, and those to compute in; None where not known."""
        options = _CONTEXTS[kind]._replace(
            token_count=self._token_count, batch_count=self._micro_batches[kind]
        )
        context = self._footprint.context(options)
        computing = self._footprint.compute_length(options)
        return None if context is None or computing is None else (context.length, computing)

    @property
    def layer_count(self) -> int:
        """How many layers there are, with experts or without."""
        return self.weights.block_count or len(self.weights.layers)

    @property
    def step_length(self) -> int | None:
        """The bytes of the experts that a token uses in all layers."""
        return self.weights.read_expert_length

    def step_of(self, layers: Collection[int]) -> int | None:
        """Return the bytes of the experts that a token uses in some layers; None if not known."""
        lengths = [one.used_expert_length for one in self.layers if one.layer in layers]
        return None if None in lengths else sum(length or 0 for length in lengths)

    def reads(self, way: Way, missed: float, depth: float, uploaded: float = 0.0) -> Reads | None:
        """Return what a token reads, `missed` bytes of it of the drive, after `depth` tokens.

        `uploaded` bytes are missed by a cache in VRAM, where there is one. None where it is not
        known how many experts, or which other bytes, it reads.
        """
        reads = self._reads(way.kind, way.keeps_in_memory, missed, depth)
        if reads is None or way.vram_cache is None:
            return reads
        return reads._replace(vram=reads.vram + reads.memory, memory=0.0, link=uploaded)

    def read_by(self, receipt: Receipt) -> Reads | None:
        """Return what a token read in a run that was measured."""
        keeps = receipt.keeps_in_memory
        return self._reads(receipt.kind, keeps, receipt.read_length, receipt.depth)

    def _reads(
        self, kind: Kind, keeps: Callable[[int], bool], missed: float, depth: float
    ) -> Reads | None:
        dense, experts = self.weights.read_dense_length, self.step_length
        if dense is None or experts is None:
            return None
        rest = dense + (0 if self._context is None else self._context.read_length(round(depth)))
        count = len(self.layers)
        if kind in ("cpu", "stream"):
            return Reads(count, memory=rest + experts, drive=missed)
        kept = sum(one.used_expert_length or 0 for one in self.layers if keeps(one.layer))
        return Reads(count, vram=rest + experts - kept, memory=kept, drive=missed)

    def needs(self, way: Way) -> Needs:
        """Return what a way takes."""
        dense, outer = self.weights.dense_length, self.weights.outer
        lengths = self._lengths[way.kind]
        if dense is None or outer is None or lengths is None:
            return Needs(None, None)
        rest = dense + sum(lengths)
        experts = self.weights.expert_length
        kept = self.kept_length(way)
        held = kept if way.budget is None else min(way.budget, kept)
        if way.kind in ("cpu", "stream"):
            return Needs(0, rest + held)
        # Embeddings are looked up in memory, whatever is offloaded (llama-model.cpp, b11549).
        embeddings = outer.embedding_length
        tied = outer.output_length if outer.is_tied else 0
        on_gpu = rest - embeddings + tied + experts - kept + (way.vram_cache or 0)
        # For a prompt llama.cpp copies the experts of a tensor that are used into one as long as
        # it, in the GPU's compute buffer (op offload; one at a time, as its allocator shares it).
        staged = self.weights.staged_length if kept else 0
        return Needs(on_gpu + staged, embeddings + held)

    def kept_length(self, way: Way) -> int:
        """Return the bytes of experts that are not in VRAM for good."""
        return sum(one.expert_length for one in self.layers if way.keeps_in_memory(one.layer))

    def offload(self, cpu_layer_count: int) -> Way:
        """Return the way in which the experts of the first so many blocks are in memory."""
        has_any = any(one.layer < cpu_layer_count for one in self.layers)
        return Way("offload" if has_any else "gpu", cpu_layer_count)

    def offloads(self) -> list[Way]:
        """Return every `--n-cpu-moe N` that makes a difference, from 0 to all layers."""
        return [self.offload(end) for end in (0, *(one.layer + 1 for one in self.layers))]

    def best(self, machine: Machine, streams: Way) -> Way:
        """Return the way that is fastest of those that fit: as little in memory as VRAM allows.

        Where none does, it is `streams`, with all the memory that is left.

        Raises RequestError below the floor.
        """
        ways = [*(self.offloads() if machine.gpus else ()), Way("cpu")]
        fitting = (way for way in ways if self._may_fit(way, machine))
        return next(fitting, None) or self._fullest(streams, machine)

    def _may_fit(self, way: Way, machine: Machine) -> bool | None:
        """Say whether a way fits; where that is not known, whether its experts alone do."""
        fits = self.needs(way).fit(machine)
        if fits is not None:
            return fits
        kept = self.kept_length(way)
        return Needs(self.weights.expert_length - kept, kept).fit(machine)

    def stream(self, machine: Machine) -> Way:
        """Return the way with experts from the drive, and all that VRAM has room for there.

        That is what is no expert's, then the experts of as many layers as fit: those need no room
        in memory.
        """
        ends = [one.layer + 1 for one in self.layers]
        for end in ends if machine.gpus else ():
            way = Way("gpu-stream", end, budget=0)
            if self.needs(way).fit(machine._replace(memory=_ENDLESS)):
                return way
        return Way("stream", budget=0)

    def _fullest(self, way: Way, machine: Machine) -> Way:
        """Return a way with all the memory that is left for experts.

        Raises RequestError below the floor.
        """
        fixed = self.needs(way._replace(budget=0)).memory or 0
        layers = [one.layer for one in self.layers if way.keeps_in_memory(one.layer)]
        memory, step = int(machine.memory.value), self.step_of(layers) or 0
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
        return way._replace(budget=min(left, self.kept_length(way)))
