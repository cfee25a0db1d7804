"""A text from a server of llama.cpp, piece by piece, and its cost."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from http.client import HTTPException, HTTPResponse
from typing import Any, Literal

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, MoepackError, RequestError

End = Literal["stop", "length", "context", "left"]
"""Why a text ends: by the model or a stop text; it has the requested tokens; the context is full;
it was cancelled."""

_THOUGHTS_BEGIN, _THOUGHTS_END = "<think>\n", "\n</think>\n\n"
_TEMPLATE_ERROR = "Jinja Exception: "
_MAX_LINE_LENGTH = 1 << 24
_NOT_IMPLEMENTED = 501
"""The status if an option of the server has to allow a request."""


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """Figures of one phase: computing a prompt, or the tokens after it one by one.

    `step_count` is tokens that were computed.
    """

    step_count: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerFacts(PhaseFacts):
    """A text and its figures. Besides `prompt`, phases are about the tokens after its first.

    `processed_count` tokens of the prompt are processed so far, of which `kept_count` were kept
    from an earlier text. The last of the text's `token_count` tokens needs no step. `thoughts`
    precede the answer. `first_token_seconds` is from the request to the first token, `seed` the
    sampler's.
    """

    text: str = ""
    thoughts: str = ""
    end: End = "left"
    token_count: int = 0
    prompt_count: int = 0
    kept_count: int = 0
    processed_count: int = 0
    first_token_seconds: float | None = None
    prompt: PhaseFacts = PhaseFacts()
    seed: int = 0


class Answer(Closing):
    """A text piece by piece, for one iteration. A context manager, which cancels the text.

    `response` is None if the request was cancelled before it was answered. It asked for `count`
    tokens at `began` (`time.monotonic`) with `seed`. `read_event` returns an event's addition to
    the thoughts and to the text, and why the text ends. Thoughts come between `<think>` and
    `</think>`.

    While iterating, raises RequestError or MachineError with the server's own words, and if the
    connection ends, the error that `lost` returns, None after a cancellation.
    """

    def __init__(
        self,
        response: HTTPResponse | None,
        close: Callable[[], None],
        lost: Callable[[], MoepackError | None],
        read_event: Callable[[Mapping[str, Any]], tuple[str, str, str]],
        count: int | None,
        seed: int,
        began: float,
    ) -> None:
        self._response = response
        self._close = close
        self._lost = lost
        self._read_event = read_event
        self._count = count
        self._began = began
        self._is_done = False
        self.facts = AnswerFacts(seed=seed)
        """The text and its figures so far."""
        self.on_event: Callable[[AnswerFacts], None] = lambda facts: None
        """Called with the facts so far, whenever the server has sent something."""

    def close(self) -> None:
        """Cancel the text: the server stops computing it."""
        if self._response is not None:
            self._response.close()
        self._close()

    @property
    def text(self) -> str:
        """The text so far, without thoughts."""
        return self.facts.text

    @property
    def so_far(self) -> PhaseFacts:
        """The figures of the current phase: the prompt, or the tokens after its first."""
        return self.facts if self.facts.token_count else self.facts.prompt

    def __iter__(self) -> Iterator[str]:
        reason = ""
        for event in self._events():
            thought, text, ended = self._read_event(event)
            reason = ended or reason
            begins, ends = "", ""
            if thought and not self.facts.thoughts:
                begins = _THOUGHTS_BEGIN
            if text and not self.facts.text and (thought or self.facts.thoughts):
                ends = _THOUGHTS_END
            facts = _with_timings(self.facts, event)
            if facts.token_count and facts.first_token_seconds is None:
                facts = replace(facts, first_token_seconds=time.monotonic() - self._began)
            self.facts = replace(facts, text=facts.text + text, thoughts=facts.thoughts + thought)
            self.on_event(self.facts)
            if piece := begins + thought + ends + text:
                yield piece
        if self.facts.thoughts and not self.facts.text:
            yield _THOUGHTS_END
        if self._is_done:
            end: End = "stop"
            if reason in ("length", "limit"):
                end = "length" if self.facts.token_count == self._count else "context"
            self.facts = replace(self.facts, end=end)

    def _events(self) -> Iterator[Mapping[str, Any]]:
        try:
            while self._response and (line := self._response.readline(_MAX_LINE_LENGTH)):
                name, _, value = line.rstrip(b"\r\n").partition(b": ")
                if name == b"error" or value.startswith(b'{"error"'):
                    raise error_from(500, value)
                self._is_done = self._is_done or value == b"[DONE]"
                if name == b"data" and value != b"[DONE]":
                    event = json.loads(value)
                    self._is_done = self._is_done or bool(event.get("stop"))
                    yield event
        except (OSError, HTTPException, ValueError):
            self._is_done = False
        if not self._is_done and (error := self._lost()) is not None:
            raise error


def _with_timings(facts: AnswerFacts, event: Mapping[str, Any]) -> AnswerFacts:
    """Return facts with an event's timings, which have llama.cpp's names."""
    progress, timings = event.get("prompt_progress"), event.get("timings")
    if progress:
        facts = replace(
            facts,
            prompt_count=progress["total"],
            kept_count=progress["cache"],
            processed_count=progress["processed"],
        )
    if not timings:
        return facts
    count = timings["predicted_n"]
    return replace(
        facts,
        **asdict(_phase(max(0, count - 1), timings["predicted_ms"])),
        token_count=count,
        kept_count=timings["cache_n"],
        prompt_count=max(facts.prompt_count, timings["cache_n"] + timings["prompt_n"]),
        prompt=_phase(timings["prompt_n"], timings["prompt_ms"]),
    )


def _phase(count: int, milliseconds: float) -> PhaseFacts:
    seconds = milliseconds / 1000
    return PhaseFacts(count, seconds, count / seconds if count and seconds else None)


def error_from(status: int, body: bytes) -> MoepackError:
    """Return the error in a server's answer, in its own words."""
    message, kind = body.decode(errors="replace").strip(), ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
        message, kind, status = error["message"], error.get("type", ""), error.get("code", status)
    if kind == "exceed_context_size_error":
        return RequestError(
            "the prompt does not fit into the context",
            expected=f"up to {error['n_ctx']:,} tokens",
            found=f"{error['n_prompt_tokens']:,}",
            hint="give it more with `context`",
        )
    if _TEMPLATE_ERROR in message:  # after several lines of the template's text
        words = message.rpartition(_TEMPLATE_ERROR)[2]
        return RequestError(f"the model's chat template refuses the messages: {words}")
    if 400 <= status < 500 or status == _NOT_IMPLEMENTED:
        return RequestError(f"the server refuses: {message or status}")
    return MachineError(f"the server failed: {message or status}")
