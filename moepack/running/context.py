"""A context of llama.cpp for a model, with batches so large that experts have room beside it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from moepack.errors import MachineError, RequestError
from moepack.llama_cpp.log import ErrorLines
from moepack.llama_cpp.routers import Routers
from moepack.running.memory_plan import Needs, largest_batch, step_length
from moepack.shape import ModelShape

MAX_BATCH_COUNT = 512
"""Tokens of a prompt that are computed at once, where their experts have room."""

_LENGTH = re.compile(r"(?<!model) buffer size *= *([\d.]+) MiB")
"""In the lines in which llama.cpp says what a context takes (b11549)."""


class BufferLengths:
    """Adds up what llama.cpp's log says of the buffers of a context."""

    def __init__(self) -> None:
        self.length = 0

    def heard(self, line: str) -> None:
        """Take a line of the log."""
        match = _LENGTH.search(line)
        if match is not None:
            self.length += int(float(match[1]) * (1 << 20))


class Wanted(NamedTuple):
    """What memory is to be divided among: `memory` as in the engine's options, `dense` in bytes.

    `pinned` bytes of the experts' budget, and all but one of `share_count` shares of the rest, are
    of no use to a single step. Of it are `reserve` bytes kept, where they are left, or in any case.
    """

    shape: ModelShape
    memory: int | Literal["floor"] | None
    available: int
    dense: int
    pinned: int
    share_count: int
    reserve: int
    demands_reserve: bool

    @property
    def _kept(self) -> int:
        return self.pinned + (self.reserve if self.demands_reserve else 0)

    def needs(self, context_length: int) -> Needs:
        """Return what the model needs beside a context of so many bytes."""
        experts = self.shape.routed_length
        return Needs(self.dense, context_length, step_length(self.shape) + self._kept, experts)

    def budget(self, needs: Needs) -> int:
        """Return the bytes for experts. Raises RequestError below the floor."""
        memory = needs.floor if isinstance(self.memory, str) else self.memory
        return needs.budget(memory, self.available)

    def reserve_of(self, needs: Needs, budget: int) -> int:
        """Return the bytes of the budget that are kept in reserve: none where nothing is read."""
        is_left = budget - self.pinned - self.reserve >= step_length(self.shape)
        return self.reserve if is_left and budget < needs.experts else 0

    def batch(self, budget: int, most: int) -> int:
        """Return how many tokens may be computed at once within a budget."""
        return largest_batch(self.shape, (budget - self._kept) // self.share_count, most)


class Context(NamedTuple):
    """A context at `address` of `length` bytes, for batches of up to `batch_count` tokens.

    Of these bytes a checkpoint has `checkpoint_length`: none where the context forgets nothing.
    Beside it are `budget` bytes for experts, and `reserve`.
    """

    address: int
    length: int
    checkpoint_length: int
    batch_count: int
    budget: int
    reserve: int


class Contexts:
    """Makes contexts for the model at `model`, of `length` tokens, whose routers are watched.

    `checkpoint_length` gives the bytes of a checkpoint beside a context for such batches.
    """

    def __init__(
        self,
        library: Any,
        model: int,
        routers: Routers,
        errors: ErrorLines,
        lengths: BufferLengths,
        *,
        length: int,
        threads: int,
        checkpoint_length: Callable[[int], int],
    ) -> None:
        self._library = library
        self._model = model
        self._routers = routers
        self._errors, self._lengths = errors, lengths
        self._checkpoint_length = checkpoint_length
        self._length = length
        self._threads = threads

    def fitting(self, wanted: Wanted) -> Context:
        """Make the context with the largest batches beside which their experts have room.

        Whoever gets it frees it. Raises RequestError where there is none, and MachineError where
        llama.cpp refuses.
        """
        batch_count = min(MAX_BATCH_COUNT, self._length)
        while True:
            address = self._make(batch_count)
            try:
                checkpoint_length = self._checkpoint_length(batch_count)
                needs = wanted.needs(self._lengths.length + checkpoint_length)
                budget = wanted.budget(needs)
                fitting = wanted.batch(budget, batch_count)
                if fitting == batch_count:
                    reserve = wanted.reserve_of(needs, budget)
                    return Context(
                        *(address, needs.context, checkpoint_length),
                        *(batch_count, budget - reserve, reserve),
                    )
            except RequestError:
                if batch_count == 1:
                    self._library.llama_free(address)
                    raise
                fitting = batch_count // 2  # which needs less itself
            self._library.llama_free(address)
            batch_count = fitting

    def _make(self, batch_count: int) -> int:
        params = self._library.llama_context_default_params()
        params.n_ctx = self._length
        params.n_batch = params.n_ubatch = batch_count
        params.n_threads = params.n_threads_batch = self._threads
        params.swa_full = False  # as llama.cpp's programs have it: windows keep what they need
        params.cb_eval = ctypes.cast(self._routers.callback, ctypes.c_void_p)
        self._lengths.length = 0
        self._errors.clear()
        address = self._library.llama_init_from_model(self._model, params)
        if address is None:
            raise MachineError(f"llama.cpp cannot make a context: {self._errors}")
        return int(address)
