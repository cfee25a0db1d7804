"""A model that runs from a pack: llama.cpp computes, experts are read when they were chosen."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from moepack.caching import cache as caching
from moepack.engines.gguf_layout import lay_out
from moepack.engines.source_header import source_of
from moepack.errors import RequestError, SourceError
from moepack.footprint.attention import attention_of
from moepack.footprint.context import MOEPACK_RUN, context_of
from moepack.keys import ExpertKey
from moepack.llama_cpp import library
from moepack.llama_cpp.bounds import check_context, check_threads
from moepack.llama_cpp.calls import Calls
from moepack.llama_cpp.decoding import Chosen, RoutedDecoder
from moepack.llama_cpp.library import cpu_count
from moepack.llama_cpp.log import ErrorLines
from moepack.llama_cpp.routers import Routers
from moepack.llama_cpp.sampling import Sampling, sampler
from moepack.llama_cpp.vocabulary import Vocabulary
from moepack.machine.memory_limits import available_memory
from moepack.reading.pack import Pack
from moepack.running.context import BufferLengths, Contexts, Wanted
from moepack.running.expert_memory import ExpertMemory
from moepack.running.expert_store import ExpertStore, Usage, bring
from moepack.running.history import History
from moepack.running.loaded_model import Loading, load_model
from moepack.running.owned import Owned
from moepack.running.places import Places, find_places, length_of
from moepack.running.prefetch import Prefetch, Prefetching, reserve_length
from moepack.shape import ROUTED_FAMILY
from moepack.storage.backend import Backend

_PAGE = 4096


class EngineOptions(NamedTuple):
    """How a pack is run.

    `memory` is bytes for dense part, context and experts together, `floor` for the least that
    works; by default what is available, less a margin. `policy` is one of `moepack.caching`'s; of
    the hottest experts up to `pinned` bytes are never given up. `context` is in tokens, `threads`
    are all CPUs that this process may use unless given. `backend` and `check` are the reader's.
    `prefetch` says whether experts are read ahead, before routers choose them: `on`, `off`, or as
    it is measured to be faster. With `all_choices` each router runs for each token, as a trace
    needs it; without it the last layer computes only what is asked for.
    """

    memory: int | Literal["floor"] | None = None
    policy: str = "lru"
    pinned: int = 0
    context: int = 4096
    threads: int | None = None
    backend: str | Backend = "auto"
    check: str = "first"
    prefetch: Prefetching = "auto"
    all_choices: bool = False


class MemoryUse(NamedTuple):
    """What memory is for, in bytes.

    `experts` is the budget of the cache, `pinned` a part of it; `reserve` is for what is read
    ahead, and for pages between two uses.
    """

    dense: int
    context: int
    experts: int
    pinned: int
    reserve: int


class Engine(Owned):
    """Runs the model of `pack`, which has to stay open. A context manager.

    It holds one sequence: `feed` goes on with it, `rewind` goes back. Used by one thread at a time,
    in the process that made it.

    Raises RequestError for options that are none and for too little memory, PackError for a pack
    that cannot be run, SourceError for a model without experts or without text, MachineError where
    llama.cpp is missing or refuses the model, and what reading raises.
    """

    _own_name = "engine"

    def __init__(self, pack: Pack, options: EngineOptions = EngineOptions()) -> None:
        threads = cpu_count() if options.threads is None else options.threads
        check_threads(threads)
        check_context(options.context)
        if options.prefetch not in get_args(Prefetching):
            expected = ", ".join(get_args(Prefetching))
            found = options.prefetch
            raise RequestError("no such prefetching", expected=expected, found=found)
        self._library: Any = library.load()
        self.pack = pack
        self.options = options
        self.shape = pack.shape.without_mtp()
        if not self.shape.routed:
            raise SourceError("no layer has experts that a router chooses", path=pack.path)
        self.model_length = 0
        """The bytes of all tensors that are run."""
        self.tokens: list[int] = []
        """The sequence that it holds."""
        self._lookup_count: int | None = None  # of a step of one token
        available = available_memory()
        with ExitStack() as stack:
            memory, dense = self._load(stack)
            self._make_room(stack, memory, dense, threads, available)
            self._own(stack)

    def _load(self, stack: ExitStack) -> tuple[ExpertMemory, int]:
        """Load what every token needs; return the memory for experts, and the bytes of the rest."""
        pack, options = self.pack, self.options
        loading, self._lengths = Loading(), BufferLengths()
        heard = loading.heard, self._lengths.heard
        self._errors = stack.enter_context(ErrorLines(self._library, *heard))
        reader = pack.reader(backend=options.backend, check=options.check)
        self.reader = stack.enter_context(reader)
        layout = lay_out(pack, _PAGE)
        dense_lengths = (tensor.length for tensor in layout.dense)
        self.model_length = sum(dense_lengths) + self.shape.expert_length
        places = find_places(pack, layout)
        self._places: Mapping[ExpertKey, Places] = places.pop(ROUTED_FAMILY)
        with ExitStack() as loading_stack:
            dense_reader = reader
            if options.backend == "auto":
                # The dense part is read once, from start to end, into fresh pages: the page cache
                # reads ahead meanwhile, where direct reads wait for each page.
                buffered = pack.reader(backend="buffered", check=options.check)
                dense_reader = loading_stack.enter_context(buffered)
            self._model, memory = load_model(
                self._library, layout, dense_reader, stack, loading, self._errors
            )
        dense = layout.experts_offset
        for family, others in places.items():
            bring(reader, memory, others, list(others), family)
            dense += sum(map(length_of, others.values()))
        return memory, dense

    def _make_room(
        self, stack: ExitStack, memory: ExpertMemory, dense: int, threads: int, available: int
    ) -> None:
        """Make the context and, of what it leaves, the cache of experts."""
        options = self.options
        lengths = {key: length_of(places) for key, places in self._places.items()}
        routed = self.shape.routed
        pinned = self.pack.hottest(options.pinned, family=ROUTED_FAMILY, layers=routed)
        pinned_length = sum(lengths[key] for key in pinned)
        routers = self._routers = Routers(self._library)
        calls = stack.enter_context(Calls(routers.stop))
        contexts = Contexts(
            *(self._library, self._model, routers, self._errors, self._lengths),
            length=options.context,
            threads=threads,
            checkpoint_length=partial(_checkpoint_length, self.pack, options.context),
        )
        wanted = Wanted(
            *(self.shape, options.memory, available, dense, pinned_length),
            share_count=len(routed) if options.policy.startswith("layer") else 1,
            reserve=reserve_length(self.shape),
            demands_reserve=options.prefetch == "on",
        )
        context = contexts.fitting(wanted)
        self._context, self.batch_count = context.address, context.batch_count
        stack.callback(self._library.llama_free, self._context)
        budget, reserve = context.budget, context.reserve
        self.memory = MemoryUse(dense, context.length, budget, pinned_length, reserve)
        self._decoder = RoutedDecoder(
            *(self._library, self._context, self._errors, calls, routers),
            path=self.pack.path,
            all_choices=options.all_choices,
        )
        cache = caching.make(options.policy, budget, lengths, pinned)
        if reserve or budget >= sum(lengths.values()):
            memory.supply(budget + reserve)
        self._store = ExpertStore(self.reader, memory, self._places, cache, reserve)
        stack.callback(self._store.forget)  # while its memory is there
        routers.met = self._store.hold
        self._prefetch = Prefetch(self._library, self.shape, self._store, options.prefetch)
        if reserve and options.prefetch != "off":
            routers.passed = self._prefetch.passed
        bring(self.reader, memory, self._places, pinned)
        self.vocabulary = Vocabulary(self._library, self._model)
        memory_address = self._library.llama_get_memory(self._context)
        if not self.vocabulary or memory_address is None:
            raise SourceError("llama.cpp makes no text with this model", path=self.pack.path)
        window = self._library.llama_model_n_swa(self._model)
        self._history = History(self._library, self._context, memory_address, window)
        self.checkpoint_length = context.checkpoint_length
        """The bytes of a checkpoint: 0 where nothing is forgotten that going back would need."""

    @property
    def usage(self) -> Usage:
        """What all steps so far needed."""
        return self._store.usage

    @property
    def held_length(self) -> int:
        """The bytes of the experts that are in memory."""
        return self._store.held_length

    @property
    def room(self) -> int:
        """How many tokens more the context takes."""
        return self.options.context - len(self.tokens)

    @property
    def chat_template(self) -> str | None:
        """The model's own template for chats; None where it has none."""
        self._check_open()
        text = self._library.llama_model_chat_template(self._model, None)
        return None if text is None else text.decode(errors="replace")

    def feed(
        self,
        tokens: Sequence[int],
        chose: Callable[[Sequence[int], Chosen], None] = lambda tokens, chosen: None,
    ) -> None:
        """Go on with `tokens`, batch by batch; `chose` is called after each with its choices.

        Without `all_choices` there may be none of a batch: where all experts are in memory.
        Raises RequestError where they do not fit into the context, and what reading experts raises,
        or whatever a signal's handler does: the sequence ends with the last whole batch then.
        """
        self._check_open()
        if not 0 < len(tokens) <= self.room:
            problem = f"{len(tokens):,} tokens do not fit into the context"
            raise RequestError(problem, expected=f"1 to {self.room:,}")
        self.vocabulary.check(tokens)
        for start in range(0, len(tokens), self.batch_count):
            batch = tokens[start : start + self.batch_count]
            try:
                chosen = self._decode(batch)
            except BaseException:
                try:
                    self._store.forget()  # once more: the first time may have been interrupted
                finally:
                    self.rewind(len(self.tokens))
                raise
            self.tokens += batch
            chose(batch, chosen)

    def _decode(self, tokens: Sequence[int]) -> Chosen:
        is_one = len(tokens) == 1
        # Where nothing is missing whatever routers choose, it is enough to know how many they do.
        known_count = self._lookup_count if is_one and self._store.holds_all else None
        started = time.perf_counter()
        try:
            layers = self.shape.routed if known_count is None else ()
            chosen = self._decoder.decode(tokens, layers)
        finally:
            self._store.forget()
        if is_one:
            self._prefetch.computed(time.perf_counter() - started)
        if known_count is not None:
            self._store.count_hits(known_count)
        elif is_one and not self.options.all_choices:
            self._lookup_count = sum(len(set(choice.values)) for choice in chosen.values())
        return chosen

    def save_checkpoint(self) -> None:
        """Keep what going back to where the sequence ends now will need, instead of the last."""
        self._check_open()
        if self.checkpoint_length:
            self._history.save(len(self.tokens))

    def rewind(self, count: int) -> None:
        """Forget all but the first `count` tokens, or more.

        A model with windows or states (Mamba and the like) keeps not all that its tokens look back
        on: then it forgets all but the checkpoint's, or all of them.
        """
        self._check_open()
        tokens, self.tokens = self.tokens, []  # if this is interrupted, nothing counts as there
        self.tokens = tokens[: self._history.go_back(count)]

    def logits(self) -> NDArray[np.float32]:
        """Return what the model says of each token of the vocabulary as the next one."""
        self._check_open()
        address = self._library.llama_get_logits_ith(self._context, -1)
        if address is None:
            raise RequestError("there are no logits before the first token")
        floats = (ctypes.c_float * len(self.vocabulary)).from_address(address)
        return np.array(floats, np.float32)

    @contextmanager
    def sampler(self, sampling: Sampling) -> Iterator[Callable[[], int]]:
        """Give a function that chooses the token to go on with, each time anew."""
        sampling.check()
        with sampler(self._library, sampling) as chain:

            def choose() -> int:
                self._check_open()
                return int(self._library.llama_sampler_sample(chain, self._context, -1))

            yield choose


def _checkpoint_length(pack: Pack, context: int, batch_count: int) -> int:
    """Return the bytes of a checkpoint; 0 for a model of which it is not known."""
    options = MOEPACK_RUN._replace(token_count=context, batch_count=batch_count)
    try:
        return context_of(attention_of(source_of(pack)), options).checkpoint_length
    except SourceError:
        return 0
