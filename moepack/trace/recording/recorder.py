"""Record which experts a model chooses: a real llama.cpp runs it, and its routers are watched.

llama.cpp aborts the process where it finds a broken promise, which nothing here can catch.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

from moepack.errors import MachineError, RequestError, SourceError
from moepack.llama_cpp import library
from moepack.llama_cpp.bounds import check_context, check_threads
from moepack.llama_cpp.calls import Calls
from moepack.llama_cpp.decoding import Chosen, RoutedDecoder
from moepack.llama_cpp.library import cpu_count
from moepack.llama_cpp.log import ErrorLines
from moepack.llama_cpp.routers import Routers
from moepack.llama_cpp.sampling import sampler
from moepack.llama_cpp.structs import ProgressCallback
from moepack.llama_cpp.vocabulary import Vocabulary
from moepack.sizes import size_text
from moepack.source.experts import find_experts, shape_of
from moepack.source.shards import Source, open_source
from moepack.trace.choices import tokens_of
from moepack.trace.file import RECORDED
from moepack.trace.file_records import join
from moepack.trace.model import Origin, Phase, Tokens

BATCH_COUNT = 256
"""Tokens decoded at once: all of them have logits, of which each is the vocabulary's size."""

_MOST_NAME = 1 << 10


class Recorder:
    """A model that llama.cpp has loaded, and whose routers are watched. A context manager.

    `model_path` is any shard of the model, or with `origin`, which says what a recording says of
    it, a name for messages; llama.cpp opens `opened_path`, by default the same. `context_length` is
    in tokens; `threads` are all CPUs that this process may use unless given. With `repack`,
    llama.cpp's own default, weights are copied into a form that this processor multiplies faster,
    and which rounds otherwise; without it they stay in the files' pages, so a model may be larger
    than memory. Used by one thread at a time, for one request at a time.

    Raises SourceError for a model that has no experts, or no vocabulary, or makes no text;
    MachineError where llama.cpp is missing or refuses the model, with its own words, and for a
    model that does not fit into memory where it may be repacked.
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
        threads = cpu_count() if threads is None else threads
        check_context(context_length)
        check_threads(threads)
        if origin is None:
            source = open_source([model_path])
            model_path = source.shards[0].path
            if repack:
                _check_fits_memory(source)
            origin = origin_of(source)
        self.path = model_path
        self._opened_path = opened_path or model_path
        self.expert_counts = origin.expert_counts or {}
        """Experts of each layer whose router is watched."""
        self.context_length = context_length
        self._library: Any = library.load()
        self._routers = Routers(self._library)
        self._is_open = True
        with ExitStack() as stack:
            self._errors = stack.enter_context(ErrorLines(self._library))
            self._calls = stack.enter_context(Calls(self._routers.stop))
            self._model = self._load(stack, repack)
            self._vocabulary = Vocabulary(self._library, self._model)
            self._context = self._open_context(stack, threads)
            self._decoder = RoutedDecoder(
                *(self._library, self._context, self._errors, self._calls, self._routers),
                path=self.path,
            )
            self._memory = self._library.llama_get_memory(self._context)
            if not self._vocabulary:
                raise SourceError("the model has no vocabulary", path=self.path)
            if self._memory is None:
                raise SourceError("llama.cpp makes no text with this model", path=self.path)
            self._stack = stack.pop_all()

    def _load(self, stack: ExitStack, repack: bool) -> int:
        going = ProgressCallback(lambda *_: not self._routers.stopped)
        params = self._library.llama_model_default_params()
        params.progress_callback = ctypes.cast(going, ctypes.c_void_p)
        params.use_extra_bufts = repack
        path = os.fsencode(self._opened_path)
        model = self._calls.run(lambda: self._library.llama_model_load_from_file(path, params))
        if model is None:
            raise self._refusal("cannot load the model")
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
            raise self._refusal("cannot make a context")
        stack.callback(self._library.llama_free, context)
        return int(context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model."""
        self._is_open = False
        self._stack.close()

    @property
    def bos(self) -> int | None:
        """The token that begins each text, None where the vocabulary adds none."""
        return self._vocabulary.bos

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, with BOS if the vocabulary adds it. `<|…|>` may be one."""
        self._check_open()
        return self._vocabulary.tokenize(text)

    def prefill(self, tokens: Sequence[int], *, request: int = 0) -> Tokens:
        """Decode tokens as a new request. Raises RequestError where they do not fit."""
        self._check_open()
        if not 0 < len(tokens) <= self.context_length:
            problem = f"{len(tokens)} tokens do not fit into the context"
            raise RequestError(problem, expected=f"1 to {self.context_length}")
        self._vocabulary.check(tokens)
        self._library.llama_memory_clear(self._memory, True)
        pieces = []
        for start in range(0, len(tokens), BATCH_COUNT):
            batch = tokens[start : start + BATCH_COUNT]
            pieces.append(self._decode(batch, request, Phase.PREFILL))
        return join(pieces)

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

        Ends early where the model ends its answer, and where the context is full. The same
        `temperature` (0: always the likeliest token) and `seed` give the same tokens again.
        """
        with sampler(self._library, temperature, seed) as chosen:
            yield self.prefill(prompt_tokens, request=request)
            for _ in range(min(count, self.context_length - len(prompt_tokens))):
                self._check_open()
                token = self._library.llama_sampler_sample(chosen, self._context, -1)
                if self._vocabulary.ends(token):
                    return
                yield self._decode([token], request, Phase.DECODE)

    def _decode(self, tokens: Sequence[int], request: int, phase: Phase) -> Tokens:
        chosen = self._decoder.decode(tokens, self.expert_counts)
        return self._tokens(chosen, request, phase)

    def _tokens(self, chosen: Chosen, request: int, phase: Phase) -> Tokens:
        for layer, choice in chosen.items():
            if min(choice.values) < 0 or max(choice.values) >= self.expert_counts[layer]:
                raise MachineError("a router chose an expert that is not there", path=self.path)
        arrays = {layer: choice.array() for layer, choice in chosen.items()}
        return join(list(tokens_of(arrays, request, phase)))

    def _check_open(self) -> None:
        if not self._is_open:
            raise RequestError("the recorder is closed")

    def _refusal(self, problem: str) -> MachineError:
        return MachineError(f"llama.cpp {problem}: {self._errors}", path=self.path)


def origin_of(source: Source) -> Origin:
    """Return what a recording says of its model. Raises SourceError where it has no experts."""
    shape = shape_of(source, find_experts(source)).without_mtp()
    name = source.value("general.name") or None
    return Origin(
        RECORDED,
        os.path.basename(source.shards[0].path),
        model=name and str(name)[:_MOST_NAME],
        expert_counts=shape.expert_counts,
        experts_used=shape.experts_used,
    )


def _check_fits_memory(source: Source) -> None:
    """Refuse a model whose copy would not fit: the system would kill this process."""
    length = sum(shard.file_length for shard in source.shards)
    memory_length = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if length > memory_length:
        raise MachineError(
            "the model does not fit into memory, where llama.cpp may repack its weights",
            path=source.shards[0].path,
            expected=f"up to {size_text(memory_length)}",
            found=size_text(length),
            hint="`memory` reads experts when they are chosen, `repack=False` maps the files",
        )
