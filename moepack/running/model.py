"""A model to talk to: a pack, or the shards as they lie, under llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from moepack.errors import RequestError
from moepack.llama_cpp.sampling import Sampling
from moepack.packing.opening import open_model
from moepack.paths import AnyPath, PathOrPaths
from moepack.running.chat import ChatTemplate, Message
from moepack.running.choice_writer import ChoiceWriter
from moepack.running.engine import Engine, EngineOptions, MemoryUse
from moepack.running.generation import Generation, common_count
from moepack.running.owned import Owned
from moepack.running.prefetch import Prefetching
from moepack.sizes import parse_size
from moepack.storage.backend import Backend


class Model(Owned):
    """A model that may be larger than memory, ready to go on with texts. A context manager.

    `path` is a pack, or any shard of a GGUF: then experts are read from the shards as they lie.
    `memory` and `pin` are bytes or a text such as `8GiB`, `memory` also `floor`; `trace` is the
    path of a new trace file, with a request for each text. The others are as in
    `EngineOptions`. Used by one thread at a time.

    Raises what `Engine` raises, and what opening a source or a pack and writing a trace do.
    """

    _own_name = "model"

    def __init__(
        self,
        path: PathOrPaths,
        *,
        memory: int | str | None = None,
        policy: str = "lru",
        pin: int | str = 0,
        prefetch: Prefetching = "auto",
        context: int = 4096,
        threads: int | None = None,
        backend: str | Backend = "auto",
        check: str = "first",
        trace: AnyPath | None = None,
    ) -> None:
        options = EngineOptions(
            memory="floor" if memory == "floor" else _length(memory, "memory"),
            policy=policy,
            pinned=_length(pin, "pin") or 0,
            context=context,
            threads=threads,
            backend=backend,
            check=check,
            prefetch=prefetch,
            all_choices=trace is not None,
        )
        if trace is not None and os.path.exists(trace):
            # Said before the model is loaded, which may take long.
            raise RequestError("exists already", path=trace, hint="name a new file for the trace")
        with ExitStack() as stack:
            self._pack = stack.enter_context(open_model(path))
            self._engine = stack.enter_context(Engine(self._pack, options))
            self._writer = None
            if trace is not None:
                self._writer = stack.enter_context(ChoiceWriter(trace, self._pack))
            self._own(stack)
        self._template: ChatTemplate | None = None

    @property
    def memory(self) -> MemoryUse:
        """What the memory is for."""
        return self._engine.memory

    def generate(
        self,
        prompt: str,
        *,
        count: int | None = None,
        sampling: Sampling = Sampling(),
        stops: Sequence[str] = (),
    ) -> Generation:
        """Go on with a text; iterating over what is returned computes it, piece by piece.

        Up to `count` tokens, and up to the first of `stops`. Raises RequestError for a prompt that
        does not fit into the context. While iterating comes up what `Engine.feed` raises.
        """
        return self._generation(self._engine.vocabulary.tokenize(prompt), count, sampling, stops)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        count: int | None = None,
        sampling: Sampling = Sampling(),
        stops: Sequence[str] = (),
    ) -> Generation:
        """Answer the last of `messages`; else as `generate`.

        Raises RequestError where the model has no template for chats, and what `ChatTemplate` does.
        """
        tokens = self._chat_tokens(messages)
        stable_count = self._stable_count(messages, tokens)
        return self._generation(tokens, count, sampling, stops, stable_count)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a template for chats with it."""
        return self._engine.chat_template is not None

    def check_chats(self) -> None:
        """Raise what `chat` would raise whatever the messages."""
        self._chat_template()

    def _chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        vocabulary = self._engine.vocabulary
        text = self._chat_template().prompt(messages)
        bos = self._special(vocabulary.bos)
        # A template that writes it, before a vocabulary that adds it, would give it twice.
        return vocabulary.tokenize(text, adds_bos=not (bos and text.startswith(bos)))

    def _stable_count(self, messages: Sequence[Message], tokens: Sequence[int]) -> int:
        """Return how many tokens of a chat's prompt the next one will begin with as well.

        Where the assistant begins to answer, templates write what they do not write of answers that
        were given: the start of its thoughts, most of all.
        """
        if not self._engine.checkpoint_length:
            return len(tokens)
        answered = [*messages, Message("assistant", "Yes."), Message("user", "And?")]
        try:
            return common_count(tokens, self._chat_tokens(answered))
        except RequestError:  # a template may refuse any messages
            return len(tokens)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            text = self._engine.chat_template
            if text is None:
                raise RequestError(
                    "the model has no template for chats",
                    path=self._pack.path,
                    hint="give it a text to go on with: --raw -p TEXT",
                )
            vocabulary = self._engine.vocabulary
            names = self._special(vocabulary.bos), self._special(vocabulary.eos)
            self._template = ChatTemplate(text, str(self._pack.path), *names)
        return self._template

    def _special(self, token: int | None) -> str:
        if token is None:
            return ""
        return self._engine.vocabulary.text_of(token, special=True).decode(errors="replace")

    def _generation(
        self,
        tokens: Sequence[int],
        count: int | None,
        sampling: Sampling,
        stops: Sequence[str],
        stable_count: int | None = None,
    ) -> Generation:
        options: dict[str, Any] = {"count": count, "sampling": sampling, "stops": stops}
        options["stable_count"] = stable_count
        if self._writer is not None:
            options["chose"] = self._writer.begin()
        return Generation(self._engine, tokens, **options)


def _length(given: int | str | None, option: str) -> int | None:
    if not isinstance(given, str):
        return given
    try:
        return parse_size(given)
    except ValueError as error:
        raise RequestError(f"not a length: {error}", place=option) from None
