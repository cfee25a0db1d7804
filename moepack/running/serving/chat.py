"""A chat with a model behind a server, and its history."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from moepack.common.errors import RequestError
from moepack.running.serving.client import Answer, Cancellation, ServerClient
from moepack.running.serving.sampling import MAX_SEED, Sampling

Message = dict[str, str]


class Conversation:
    """The messages of a chat: the user's, and the model's answers.

    `system` is the system prompt; `options` are those of `ServerClient.chat`. If it `is_raw`, each
    text is continued alone and without a template: nothing would separate it from earlier texts.
    """

    def __init__(
        self,
        client: ServerClient,
        system: str | None = None,
        *,
        is_raw: bool = False,
        sampling: Sampling = Sampling(),
        **options: Any,
    ) -> None:
        self._client = client
        self._sampling, self._options = sampling, options
        self.system, self.is_raw = system, is_raw
        self.clear()

    def clear(self) -> None:
        """Drop all messages but the system prompt."""
        self._messages: list[Message] = []
        self._retry_count = 0

    @property
    def has_past(self) -> bool:
        """Whether answers depend on earlier messages."""
        return bool(self._messages) and not self.is_raw

    def ask(
        self, text: str, cancellation: Cancellation | None = None
    ) -> AbstractContextManager[Answer]:
        """Ask something; the context manager's end keeps the part of the answer that was read.

        Without an answer the question is dropped as well. Raises what `ServerClient.chat` raises.
        """
        question = {"role": "user", "content": text}
        past = [] if self.is_raw else self._messages
        return self._answer([*past, question], self._sampling, cancellation)

    def ask_again(self, cancellation: Cancellation | None = None) -> AbstractContextManager[Answer]:
        """Regenerate the last answer with another seed, and replace it once there is a new one.

        Raises RequestError if nothing was answered yet, and what `ask` raises.
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
        options: Any = {"sampling": sampling, "cancellation": cancellation, **self._options}
        if self.is_raw:
            answering = self._client.complete(messages[-1]["content"], **options)
        else:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            answering = self._client.chat([*system, *messages], **options)
        with answering as answer:
            try:
                yield answer
            finally:
                facts = answer.facts
                message = {"role": "assistant", "content": facts.text}
                if facts.thoughts:  # templates decide which of them they repeat
                    message["reasoning_content"] = facts.thoughts
                if facts.text or facts.thoughts:
                    self._messages = [*messages, message]
