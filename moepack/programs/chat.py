"""A chat with a model behind a server: what was said, and what is said next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from moepack.errors import RequestError
from moepack.programs.answer import Answer
from moepack.programs.cancellation import Cancellation
from moepack.programs.client import ServerClient
from moepack.programs.sampling import MAX_SEED, Sampling

Message = dict[str, str]


class Conversation:
    """What was said to a model, and what it answered.

    `system` is what the model is told before all else; `options` are those of `ServerClient.chat`.
    """

    def __init__(
        self,
        client: ServerClient,
        system: str | None = None,
        *,
        sampling: Sampling = Sampling(),
        **options: Any,
    ) -> None:
        self._client = client
        self._sampling, self._options = sampling, options
        self.system = system
        self.clear()

    def clear(self) -> None:
        """Forget all but what the model is told before all else."""
        self._messages: list[Message] = []
        self._retry_count = 0

    @property
    def has_past(self) -> bool:
        """Whether anything is left of what was said."""
        return bool(self._messages)

    def ask(
        self, text: str, cancellation: Cancellation | None = None
    ) -> AbstractContextManager[Answer]:
        """Say something, and have it answered; what was answered until this is left is kept.

        Where nothing was, what was said is forgotten as well. Raises what `ServerClient.chat` does.
        """
        said = {"role": "user", "content": text}
        return self._answer([*self._messages, said], self._sampling, cancellation)

    def ask_again(self, cancellation: Cancellation | None = None) -> AbstractContextManager[Answer]:
        """Have the last message answered anew, with another seed.

        The answer that it had is kept until there is another. Raises RequestError where nothing
        was answered yet, and what `ask` does.
        """
        if not self._messages:
            raise RequestError("nothing has been answered yet")
        self._retry_count += 1
        seed = (self._sampling.seed + self._retry_count) % (MAX_SEED + 1)
        return self._answer(self._messages[:-1], self._sampling._replace(seed=seed), cancellation)

    @contextlib.contextmanager
    def _answer(
        self, messages: list[Message], sampling: Sampling, cancellation: Cancellation | None
    ) -> Iterator[Answer]:
        """Have the last of messages answered; with their answer they are what was said then."""
        told = [] if self.system is None else [{"role": "system", "content": self.system}]
        message: Message = {}
        options: Any = {"sampling": sampling, "cancellation": cancellation, **self._options}
        try:
            with self._client.chat([*told, *messages], **options) as answer:
                try:
                    yield answer
                finally:
                    message = _message(answer)
        finally:
            if message:
                self._messages = [*messages, message]


def _message(answer: Answer) -> Message:
    """Return what the model is reminded of; templates choose which thoughts they repeat."""
    text, thoughts = answer.facts.text, answer.facts.thoughts
    if not text and not thoughts:
        return {}
    message = {"role": "assistant", "content": text}
    return message | {"reasoning_content": thoughts} if thoughts else message
