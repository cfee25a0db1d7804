"""What a client asks for: JSON of somebody else's, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from moepack.errors import RequestError
from moepack.llama_cpp.sampling import Sampling
from moepack.running.chat import Message

MAX_MESSAGES = 4096
MAX_STOPS = 16
_SHOWN_LENGTH = 60
_ROLES = ("system", "developer", "user", "assistant")


class TextRequest(NamedTuple):
    """A text to be made: of `messages` that are to be answered, or after `prompt`.

    With `streams` it is sent piece by piece, with `counts_usage` and at the end what it took.
    """

    messages: tuple[Message, ...]
    prompt: str
    token_count: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    streams: bool
    counts_usage: bool


def chat_request(body: Any) -> TextRequest:
    """Read the body of a request to answer messages. Raises RequestError."""
    fields = _object(body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise _wrong("messages", f"a list of 1 to {MAX_MESSAGES:,} messages", messages)
    return _request(fields, tuple(map(_message, messages)), "")


def completion_request(body: Any) -> TextRequest:
    """Read the body of a request to go on with a prompt. Raises RequestError."""
    fields = _object(body)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str) or not prompt:
        raise _wrong("prompt", "one text", prompt)
    return _request(fields, (), prompt)


def _request(fields: Mapping[str, Any], messages: tuple[Message, ...], prompt: str) -> TextRequest:
    if fields.get("n") not in (None, 1):
        raise _wrong("n", "1", fields["n"])
    count = fields.get("max_completion_tokens")
    name = "max_completion_tokens"
    if count is None:
        count, name = fields.get("max_tokens"), "max_tokens"
    if count is not None and (type(count) is not int or count < 1):
        raise _wrong(name, "a number of tokens, 1 or more", count)
    streams = _flag(fields, "stream")
    usage = fields.get("stream_options") or {}
    if not isinstance(usage, dict):
        raise _wrong("stream_options", "an object", usage)
    sampling = _sampling(fields)
    counts_usage = _flag(usage, "include_usage")
    return TextRequest(messages, prompt, count, sampling, _stops(fields), streams, counts_usage)


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    """Take what is given; the names beyond OpenAI's are llama.cpp's."""
    given: dict[str, Any] = {}
    for name in Sampling._fields:
        value = fields.get(name)
        if value is None:
            continue
        kinds = (int,) if isinstance(Sampling._field_defaults[name], int) else (int, float)
        if type(value) not in kinds:
            raise _wrong(name, "a whole number" if kinds == (int,) else "a number", value)
        given[name] = value
    sampling = Sampling(**given)
    sampling.check()
    return sampling


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stops = fields.get("stop")
    if stops is None:
        return ()
    listed = [stops] if isinstance(stops, str) else stops
    if not isinstance(listed, list) or len(listed) > MAX_STOPS or not all(map(_is_text, listed)):
        raise _wrong("stop", f"a text, or up to {MAX_STOPS} of them", stops)
    return tuple(listed)


def _message(given: Any) -> Message:
    if not isinstance(given, dict) or given.get("role") not in _ROLES:
        raise _wrong("messages", f"messages with a role of {', '.join(_ROLES)}", given)
    role = "system" if given["role"] == "developer" else given["role"]
    return Message(role, _content(given.get("content")))


def _content(given: Any) -> str:
    """Return the text of a message, which may come in parts."""
    parts = given if isinstance(given, list) else [{"type": "text", "text": given}]
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise _wrong("messages", "content that is text", given)
        texts.append(part["text"])
    return "".join(texts)


def _object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise _wrong("body", "a JSON object", body)
    return body


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value not in (None, True, False):
        raise _wrong(name, "true or false", value)
    return bool(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _wrong(field: str, expected: str, found: object) -> RequestError:
    shown = "nothing" if found is None else repr(found)
    if len(shown) > _SHOWN_LENGTH:
        shown = f"{shown[:_SHOWN_LENGTH]}…"
    return RequestError("cannot be served", place=field, expected=expected, found=shown)
