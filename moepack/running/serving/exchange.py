"""A request and its answer, as they pass the gate: their figures, and nothing of their texts.

llama.cpp's server states tokens and times at the end of its answers: in `timings`, or where the
format of another API has none, in `usage`. Quotes in texts are escaped, so that these names with
theirs are never part of one. The last that passed count; texts are not kept.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11

from moepack.common.escaping import shorten
from moepack.running.serving.peer import RefusedError
from moepack.running.streaming.control import CacheStatistics

_TIMINGS, _USAGE, _KIND = b'"timings":', b'"usage":', b'"type":'
_MOST = 1 << 10
"""Bytes of a name and its value, at most."""
_DATA, _END = b"data: ", b"\n\n"
_PROGRESS = "prompt_progress"


@dataclass
class TextFigures:
    """The tokens of a prompt, of which `kept_count` were computed earlier, and of its answer.

    Times are those of computing; an answer's begins with its first token. Figures that llama.cpp
    does not state are None.
    """

    prompt_count: int | None = None
    kept_count: int | None = None
    token_count: int | None = None
    prompt_seconds: float | None = None
    answer_seconds: float | None = None

    @property
    def prompt_rate(self) -> float | None:
        """The computed tokens of the prompt in a second."""
        if self.prompt_count is None or self.kept_count is None or not self.prompt_seconds:
            return None
        return (self.prompt_count - self.kept_count) / self.prompt_seconds

    @property
    def answer_rate(self) -> float | None:
        """The tokens in a second after the first."""
        if self.token_count is None or self.token_count < 2 or not self.answer_seconds:
            return None
        return (self.token_count - 1) / self.answer_seconds


class PassingFigures:
    """Finds the figures of an answer in its pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._values: dict[bytes, bytes] = {}
        self._first_usage = b""
        self._began: float | None = None
        self._first_at = self._last_at = 0.0

    def begin(self) -> None:
        """Note that the server begins to compute."""
        self._began = time.monotonic()

    def note(self, piece: bytes) -> None:
        """Note a piece of the answer."""
        self._last_at = time.monotonic()
        self._first_at = self._first_at or self._last_at
        window = self._rest + piece
        for name in (_TIMINGS, _USAGE, _KIND):
            if (start := window.rfind(name)) >= 0:
                self._values[name] = window[start + len(name) : start + _MOST]
        if not self._first_usage and (start := window.find(_USAGE)) >= 0:
            self._first_usage = window[start + len(_USAGE) : start + _MOST]
        self._rest = window[-_MOST:]

    @property
    def error_kind(self) -> str | None:
        """The kind of an error that is the answer; its message may quote the request."""
        kind = _value(self._values.get(_KIND, b""))
        return shorten(kind) if isinstance(kind, str) else None

    def figures(self, *, is_stream: bool) -> TextFigures:
        """Return the figures; those of a stream without `timings` have the gate's own times."""
        timings = _object(self._values.get(_TIMINGS, b""))
        if timings:
            kept, computed = _count(timings, "cache_n"), _count(timings, "prompt_n")
            return TextFigures(
                prompt_count=None if kept is None or computed is None else kept + computed,
                kept_count=kept,
                token_count=_count(timings, "predicted_n"),
                prompt_seconds=_seconds(timings, "prompt_ms"),
                answer_seconds=_seconds(timings, "predicted_ms"),
            )
        usage = _object(self._values.get(_USAGE, b""))
        if is_stream:  # the first event of Anthropic's API has the prompt, and the last the answer
            usage = _object(self._first_usage) | usage
        figures = _read_usage(usage)
        if usage and is_stream and self._began is not None:
            figures.prompt_seconds = self._first_at - self._began
            figures.answer_seconds = self._last_at - self._first_at
        return figures


class PromptProgress:
    """Moves on the progress of a prompt that a stream told last.

    The server tells it to clients that ask for it (`return_progress`), once a batch, which may take
    half a minute. Between these, the tokens that were routed tell how far a batch is:
    `routed_count` returns the tokens that were routed so far; None while they are not of this text
    alone.
    """

    def __init__(self, routed_count: Callable[[], int | None]) -> None:
        self._routed_count = routed_count
        self._last: dict[str, Any] | None = None
        self._began, self._told = 0.0, 0
        self._routed: int | None = None

    def note(self, piece: bytes) -> None:
        """Note a piece of the stream, whose last event may tell the progress of a prompt."""
        event = piece.removesuffix(_END).rpartition(_END)[2]
        self._last = _read_progress(event) if piece.endswith(_END) else None
        self._began, self._routed = time.monotonic(), self._routed_count()
        self._told = self._last[_PROGRESS]["processed"] if self._last else 0

    def next_event(self) -> bytes | None:
        """Return an event of the server, with the progress so far; None if it has not moved on."""
        if self._last is None:
            return None
        progress, now = dict(self._last[_PROGRESS]), self._routed_count()
        if now is None or self._routed is None:
            self._routed = None  # what others have routed stays in the count
            return None
        processed = min(progress["processed"] + now - self._routed, progress["total"] - 1)
        if processed <= self._told:
            return None
        self._told = processed
        passed = round(1000 * (time.monotonic() - self._began))
        progress |= {"processed": processed, "time_ms": progress["time_ms"] + passed}
        return _DATA + json.dumps({**self._last, _PROGRESS: progress}).encode() + _END


class Exchange:
    """A request and its answer, from the moment when its head is there."""

    def __init__(self) -> None:
        self.method = self.path = ""
        self.is_for_text = self.is_stream = self.has_left = False
        self.status: int | None = None
        self.passing = PassingFigures()
        self._reason: str | None = None
        self._before: CacheStatistics | None = None
        self._began: float | None = None
        self._waited_from: float | None = None
        self._waited_to: float | None = None

    def begin(self, method: bytes, target: bytes) -> None:
        """Set the method and the path; the query may have a key, and is left out."""
        self._began = time.monotonic()
        self.method = shorten(method.decode("latin-1"))
        self.path = shorten(target.partition(b"?")[0].decode("latin-1"))

    def wait(self) -> None:
        """Note that a text waits for its turn."""
        self.is_for_text = True
        self._waited_from = time.monotonic()

    def ask(self, cache: CacheStatistics | None) -> None:
        """Note that the server is asked, with the counts of its cache so far."""
        self._before = cache
        self._waited_to = time.monotonic()
        self.passing.begin()

    def refuse(self, error: h11.RemoteProtocolError, is_at_end: bool) -> None:
        """Note why it is refused; a client whose request `is_at_end` too early has left.

        h11's own errors quote the request.
        """
        if isinstance(error, RefusedError):
            self._reason = None if self.has_left else shorten(error)
        else:
            self.has_left = is_at_end
            self._reason = None if is_at_end else "no valid HTTP"
        if not self.has_left:
            self.status = self.status or error.error_status_hint

    @property
    def reason(self) -> str | None:
        """Why it was refused, or not answered to its end: of the server's error only the kind."""
        has_failed = self.status is not None and self.status >= HTTPStatus.BAD_REQUEST
        return self._reason or (self.passing.error_kind if has_failed else None)

    @property
    def text_figures(self) -> TextFigures:
        """The figures of its answer so far."""
        return self.passing.figures(is_stream=self.is_stream)

    @property
    def is_waiting(self) -> bool:
        """Whether it is a text that waits for its turn."""
        return self.is_for_text and self._waited_to is None

    @property
    def seconds(self) -> float | None:
        """The seconds since its head was there; None if that never came."""
        return None if self._began is None else time.monotonic() - self._began

    @property
    def waited_seconds(self) -> float | None:
        """The seconds in which a text has waited for its turn; None for others."""
        if self._waited_from is None:
            return None
        return (self._waited_to or time.monotonic()) - self._waited_from

    def hit_rate(self, now: CacheStatistics | None) -> float | None:
        """Return the share of lookups of experts that hit since the server was asked.

        None if nothing was looked up, or if all experts stayed in memory, which are not looked up.
        """
        before = self._before
        if before is None or now is None or before.holds_all or now.holds_all:
            return None
        hits = now.hit_count - before.hit_count
        lookups = hits + now.miss_count - before.miss_count
        return hits / lookups if lookups else None


def _value(text: bytes) -> Any:
    """Return the JSON value with which a text begins; None if it is cut off."""
    try:
        return json.JSONDecoder().raw_decode(text.decode(errors="replace").lstrip())[0]
    except (ValueError, RecursionError):
        return None


def _object(text: bytes) -> dict[str, Any]:
    value = _value(text)
    return value if isinstance(value, dict) else {}


def _count(fields: dict[str, Any], *names: str) -> int | None:
    value = next((fields[name] for name in names if name in fields), None)
    return value if isinstance(value, int) else None


def _seconds(fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    return value / 1000 if isinstance(value, int | float) else None


def _read_usage(usage: dict[str, Any]) -> TextFigures:
    """Return the tokens as OpenAI's and Anthropic's APIs state them."""
    prompt = _count(usage, "prompt_tokens", "input_tokens")
    kept = _count(usage, "cache_read_input_tokens")
    if kept is not None and prompt is not None:  # Anthropic's prompt is without them
        prompt += kept
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, dict):
            kept = _count(details, "cached_tokens")
    return TextFigures(prompt, kept, _count(usage, "completion_tokens", "output_tokens"))


def _read_progress(event: bytes) -> dict[str, Any] | None:
    """Return an event that tells the progress of a prompt, from JSON; else None."""
    if not event.startswith(_DATA) or _PROGRESS.encode() not in event:
        return None
    try:
        fields = json.loads(event.removeprefix(_DATA))
        numbers = [fields[_PROGRESS][name] for name in ("processed", "total", "time_ms")]
    except (ValueError, KeyError, TypeError):
        return None
    return fields if all(isinstance(number, int) for number in numbers) else None
