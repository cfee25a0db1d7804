"""A chat with a model behind a server: what was said, and what is said next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from moepack.programs.answer import Answer
from moepack.programs.client import ServerClient

Message = dict[str, str]


class Conversation:
    """What was said to a model, and what it answered.

    `system` is what the model is told before all else; `options` are those of `ServerClient.chat`.
    """

    def __init__(self, client: ServerClient, system: str | None = None, **options: Any) -> None:
        self._client = client
        self._options = options
        self._system = system
        self.clear()

    def clear(self) -> None:
        """Forget all but what the model is told before all else."""
        self._messages: list[Message] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})
        self._start = len(self._messages)

    @property
    def has_past(self) -> bool:
        """Whether anything is left of what was said."""
        return len(self._messages) > self._start

    @contextlib.contextmanager
    def ask(self, text: str) -> Iterator[Answer]:
        """Say something, and have it answered; what was answered until this is left is kept.

        Where nothing was, what was said is forgotten as well. Raises what `ServerClient.chat` does.
        """
        said = len(self._messages)
        self._messages.append({"role": "user", "content": text})
        message: Message = {}
        try:
            with self._client.chat(self._messages, **self._options) as answer:
                try:
                    yield answer
                finally:
                    message = _message(answer)
        finally:
            if message:
                self._messages.append(message)
            else:
                del self._messages[said:]


def _message(answer: Answer) -> Message:
    """Return what the model is reminded of; templates choose which thoughts they repeat."""
    text, thoughts = answer.facts.text, answer.facts.thoughts
    if not text and not thoughts:
        return {}
    message = {"role": "assistant", "content": text}
    return message | {"reasoning_content": thoughts} if thoughts else message
