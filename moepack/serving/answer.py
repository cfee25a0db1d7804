"""Answers as OpenAI's clients expect them: whole, or as a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from moepack.running.generation import End, GenerationFacts

_FINISHES: dict[End, str] = {
    "stop": "stop",
    "length": "length",
    "context": "length",
    "left": "length",
}

Body = dict[str, Any]


class Answer:
    """Writes one answer of the model that is called `model`: to messages, or after a prompt."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, facts: GenerationFacts) -> Body:
        """Return the answer that is not streamed."""
        finish = _FINISHES[facts.end]
        choice: Body = {"index": 0, "finish_reason": finish, "logprobs": None}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": facts.text}
        else:
            choice["text"] = facts.text
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._body(kind, [choice]) | {"usage": _usage(facts)}

    def begin(self) -> Iterator[Body]:
        """Yield what comes before the first piece of a stream."""
        if self._is_chat:
            yield self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> Body:
        """Return a piece of a stream."""
        return self._chunk({"content": text} if self._is_chat else text, None)

    def end(self, facts: GenerationFacts, *, counts_usage: bool) -> Iterator[Body]:
        """Yield what comes after the last piece of a stream."""
        yield self._chunk({} if self._is_chat else "", _FINISHES[facts.end])
        if counts_usage:
            yield self._body(self._chunk_kind, []) | {"usage": _usage(facts)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, content: Any, finish: str | None) -> Body:
        name = "delta" if self._is_chat else "text"
        choice = {"index": 0, name: content, "finish_reason": finish, "logprobs": None}
        return self._body(self._chunk_kind, [choice])

    def _body(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def _usage(facts: GenerationFacts) -> Body:
    return {
        "prompt_tokens": facts.prompt_count,
        "completion_tokens": facts.token_count,
        "total_tokens": facts.prompt_count + facts.token_count,
        "prompt_tokens_details": {"cached_tokens": facts.kept_count},
    }


def error_body(message: str, kind: str, field: str | None = None) -> Body:
    """Return an error; `kind` is one of OpenAI's types of errors."""
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}
