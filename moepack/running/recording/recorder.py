"""Record the experts of each token: a real llama.cpp runs a model, and its routers are watched.

llama.cpp aborts the process at a broken promise, which nothing here can catch.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, RequestError, SourceError
from moepack.common.sizes import size_text
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.pack import Pack
from moepack.planning.machine.memory_limits import read_memory
from moepack.planning.machine.processors import cpu_count
from moepack.running.llama_cpp import library
from moepack.running.llama_cpp.bounds import (
    MAX_CONTEXT,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_THREADS,
    check_bounds,
)
from moepack.running.llama_cpp.calls import ErrorLines, InterruptibleCalls
from moepack.running.llama_cpp.routers import Routers
from moepack.running.llama_cpp.structs import DecodeBatch, ProgressCallback, SamplerParams
from moepack.running.llama_cpp.vocabulary import Vocabulary
from moepack.running.programs.trace_writer import origin_of
from moepack.traces.choices import tokens_of
from moepack.traces.file_records import join
from moepack.traces.model import Origin, Phase, Tokens

BATCH_COUNT = 256
"""Tokens decoded at once: each has as many logits as the vocabulary has tokens."""


class Recorder(Closing):
    """A model that llama.cpp has loaded, with its routers watched. A context manager.

    `model_path` is any shard of the model, or with `origin`, the origin of its recordings, a name
    for messages; llama.cpp opens `opened_path`, by default the same. `context_length` is in tokens;
    `threads` are all CPUs that this process may use unless given. With `repack`, llama.cpp's own
    default, weights are copied into a form that this processor multiplies faster, and which rounds
    otherwise; without it they stay in the files' pages, so a model may be larger than memory. Used
    by one thread at a time, for one request at a time.

    Raises SourceError for a model that has no experts, or no vocabulary, or makes no text;
    MachineError if llama.cpp is missing or refuses the model, with its own words, and for a model
    that does not fit into memory and may be repacked.
    """

    def __init__(
        self,
        model_path: str,
        *,
        context_length: int = 4096,
        threads: int | None = None,
        repack: bool = True,
        origin: Origin | None = None,
        opened_path: str | None = None,
    ) -> None:
        threads = min(cpu_count(), MAX_THREADS) if threads is None else threads
        check_bounds("context length", context_length, 1, MAX_CONTEXT)
        check_bounds("threads", threads, 1, MAX_THREADS)
        if origin is None:
            with open_model(model_path) as pack:
                model_path = str(pack.file_paths[0])
                if repack:
                    _check_fits_memory(pack)
                origin = origin_of(pack)
        self.path = model_path
        self.expert_counts = origin.expert_counts or {}
        """By layer, the number of experts that its router selects from."""
        self.context_length = context_length
        self._library: Any = library.load()
        self._routers = Routers(self._library)
        self._is_open = True
        with ExitStack() as stack:
            self._errors = stack.enter_context(ErrorLines(self._library))
            self._calls = stack.enter_context(InterruptibleCalls(self._routers.stop))
            self._model = self._load(stack, opened_path or model_path, repack)
            self._vocabulary = Vocabulary(self._library, self._model)
            self._context = self._open_context(stack, threads)
            self._memory = self._library.llama_get_memory(self._context)
            if not self._vocabulary:
                raise SourceError("the model has no vocabulary", path=self.path)
            if self._memory is None:
                raise SourceError("llama.cpp generates no text with this model", path=self.path)
            self._stack = stack.pop_all()

    def _load(self, stack: ExitStack, path: str, repack: bool) -> int:
        going = ProgressCallback(lambda *_: not self._routers.stopped)
        params = self._library.llama_model_default_params()
        params.progress_callback = ctypes.cast(going, ctypes.c_void_p)
        params.use_extra_bufts = repack
        name = os.fsencode(path)
        model = self._calls.run(lambda: self._library.llama_model_load_from_file(name, params))
        if model is None:
            raise self._refusal("load the model")
        stack.callback(self._library.llama_model_free, model)
        return int(model)

    def _open_context(self, stack: ExitStack, threads: int) -> int:
        params = self._library.llama_context_default_params()
        params.n_ctx = self.context_length
        params.n_batch = params.n_ubatch = min(BATCH_COUNT, self.context_length)
        params.n_threads = params.n_threads_batch = threads
        params.cb_eval = ctypes.cast(self._routers.callback, ctypes.c_void_p)
        model = self._model
        context = self._calls.run(lambda: self._library.llama_init_from_model(model, params))
        if context is None:
            raise self._refusal("make a context")
        stack.callback(self._library.llama_free, context)
        return int(context)

    def close(self) -> None:
        """Free the model."""
        self._is_open = False
        self._stack.close()

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, with BOS if the vocabulary adds it. `<|…|>` may be one."""
        self._check_open()
        return self._vocabulary.tokenize(text)

    def prefill(self, tokens: Sequence[int], *, request: int = 0) -> Tokens:
        """Decode tokens as a new request. Raises RequestError if they do not fit."""
        self._check_open()
        if not 0 < len(tokens) <= self.context_length:
            problem = f"{len(tokens)} tokens do not fit into the context"
            raise RequestError(problem, expected=f"1 to {self.context_length}")
        self._vocabulary.check(tokens)
        self._library.llama_memory_clear(self._memory, True)
        batches = (tokens[start:][:BATCH_COUNT] for start in range(0, len(tokens), BATCH_COUNT))
        return join([self._decode(batch, request, Phase.PREFILL) for batch in batches])

    def generate(
        self,
        prompt_tokens: Sequence[int],
        count: int,
        *,
        request: int = 0,
        temperature: float = 0,
        seed: int = 0,
    ) -> Iterator[Tokens]:
        """Yield the prompt, then each of up to `count` tokens that the model goes on with.

        Ends early if the model ends its answer, or the context is full. The same `temperature`
        (0: always the likeliest token) and `seed` give the same tokens again.
        """
        with self._sampler(temperature, seed) as sampler:
            yield self.prefill(prompt_tokens, request=request)
            for _ in range(min(count, self.context_length - len(prompt_tokens))):
                self._check_open()
                token = self._library.llama_sampler_sample(sampler, self._context, -1)
                if self._vocabulary.ends(token):
                    return
                yield self._decode([token], request, Phase.DECODE)

    @contextmanager
    def _sampler(self, temperature: float, seed: int) -> Iterator[int]:
        """Make a sampler with llama.cpp's defaults. Raises RequestError for numbers out of bounds.

        It has no min_p, which is newer: the same options record the same tokens as ever.
        """
        check_bounds("temperature", temperature, 0, MAX_TEMPERATURE)
        check_bounds("seed", seed, 0, MAX_SEED)
        calls = self._library
        chain = calls.llama_sampler_chain_init(SamplerParams(True))
        try:
            if temperature:
                links = [
                    calls.llama_sampler_init_top_k(40),
                    calls.llama_sampler_init_top_p(0.95, 1),
                    calls.llama_sampler_init_temp(temperature),
                    calls.llama_sampler_init_dist(seed),
                ]
            else:
                links = [calls.llama_sampler_init_greedy()]
            for link in links:
                calls.llama_sampler_chain_add(chain, link)
            yield chain
        finally:
            calls.llama_sampler_free(chain)

    def _decode(self, tokens: Sequence[int], request: int, phase: Phase) -> Tokens:
        """Decode a batch; return the experts of all layers.

        Raises what the routers' watcher raised; else MachineError if llama.cpp refuses, if other
        layers have routers, and for an unknown expert.
        """
        routers = self._routers
        routers.begin(len(tokens))
        try:
            self._calls.run(lambda: self._call_decode(tokens))
        except MachineError:
            if routers.error is None:
                raise
        if routers.error is not None:  # also if llama.cpp has not noticed that it was stopped
            raise routers.error
        expected, layers = sorted(self.expert_counts), sorted(routers.selections)
        if layers != expected:
            problem = "llama.cpp ran the routers of other layers"
            raise MachineError(problem, path=self.path, expected=expected, found=layers)
        for layer, selection in routers.selections.items():
            if min(selection.values) < 0 or max(selection.values) >= self.expert_counts[layer]:
                raise MachineError("a router selected an unknown expert", path=self.path)
        arrays = {layer: selection.array() for layer, selection in routers.selections.items()}
        return join(list(tokens_of(arrays, request, phase)))

    def _call_decode(self, tokens: Sequence[int]) -> None:
        ids = np.array(tokens, np.int32)
        # The last layer computes only tokens whose output is asked for.
        outputs = np.ones(len(ids), np.int8)
        batch = DecodeBatch(len(ids), token=ids.ctypes.data, logits=outputs.ctypes.data)
        self._errors.clear()
        status = self._library.llama_decode(self._context, batch)
        if status != 0:
            raise self._refusal(f"decode (status {status})")

    def _check_open(self) -> None:
        if not self._is_open:
            raise RequestError("the recorder is closed")

    def _refusal(self, act: str) -> MachineError:
        return MachineError(f"llama.cpp cannot {act}: {self._errors}", path=self.path)


def _check_fits_memory(pack: Pack) -> None:
    """Refuse a model that is too large to copy: the system would kill this process."""
    length = sum(os.path.getsize(path) for path in pack.file_paths)
    memory_length = int(read_memory().value)
    if length > memory_length:
        raise MachineError(
            "the model does not fit into memory, where llama.cpp may repack its weights",
            path=pack.file_paths[0],
            expected=f"up to {size_text(memory_length)}",
            found=size_text(length),
            hint="`memory` reads experts when they are selected, `repack=False` maps the files",
        )
