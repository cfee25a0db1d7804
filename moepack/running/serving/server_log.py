"""The log of a server: a line for each request and event, as text or as JSON.

It has neither keys nor texts of requests.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from http import HTTPStatus
from typing import IO, Any, Self

from moepack.common.escaping import one_line
from moepack.common.sizes import count_text, rate_text
from moepack.running.serving.exchange import Exchange, TextFigures
from moepack.running.serving.served_model import LogFormat

_UNKNOWN = "–"
_MOST_NOTES = 1 << 10
"""A page may be refused in ever new words."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """A request that has ended, for the log. Unknown figures are None; docs/operate.md has all.

    Without a `status` the client has left before there was one. `reason` says why it was refused.
    """

    method: str
    path: str
    status: int | None
    has_left: bool
    reason: str | None
    seconds: float | None
    waited_seconds: float | None
    prompt_count: int | None
    kept_count: int | None
    prompt_tokens_per_second: float | None
    token_count: int | None
    tokens_per_second: float | None
    hit_rate: float | None

    @classmethod
    def of(cls, exchange: Exchange, text: TextFigures, hit_rate: float | None) -> Self:
        """Return the facts of an exchange that ends now."""
        return cls(
            method=exchange.method,
            path=exchange.path,
            status=exchange.status,
            has_left=exchange.has_left,
            reason=exchange.reason,
            seconds=exchange.seconds,
            waited_seconds=exchange.waited_seconds,
            prompt_count=text.prompt_count,
            kept_count=text.kept_count,
            prompt_tokens_per_second=text.prompt_rate,
            token_count=text.token_count,
            tokens_per_second=text.answer_rate,
            hit_rate=hit_rate if exchange.is_for_text else None,
        )

    def __str__(self) -> str:
        """Return the line for people, without its time."""
        end = "left after" if self.has_left else f"{self.status} in"
        seconds = _UNKNOWN if self.seconds is None else f"{self.seconds:.2f}"
        line = f"{self.method or _UNKNOWN} {self.path or _UNKNOWN} {end} {seconds} s"
        clauses = [] if self.reason is None else [self.reason]
        if self.prompt_count is not None or (self.waited_seconds is not None and not clauses):
            clauses += self._text_clauses()
        return f"{line}: {'; '.join(clauses)}" if clauses else line

    def _text_clauses(self) -> list[str]:
        clauses = [
            f"prompt {_tokens(self.prompt_count)}, {_number(self.kept_count)} of them kept, "
            f"{_rate(self.prompt_tokens_per_second)}",
            f"answer {_tokens(self.token_count)}, {_rate(self.tokens_per_second)}",
        ]
        if self.waited_seconds is not None:
            hits = _UNKNOWN if self.hit_rate is None else f"{self.hit_rate:.1%}"
            clauses.append(f"{hits} hits, waited {self.waited_seconds:.2f} s")
        return clauses


def _number(count: int | None) -> str:
    return _UNKNOWN if count is None else f"{count:,}"


def _tokens(count: int | None) -> str:
    return f"{_UNKNOWN} tokens" if count is None else count_text(count, "token")


def _rate(rate: float | None) -> str:
    return f"{_UNKNOWN if rate is None else rate_text(rate)} tok/s"


class ServerLog:
    """Writes to `errors`, standard error, and addresses to `output` if they are no JSON.

    Without a format requests are not logged, and notes are, each once.
    """

    def __init__(self, log_format: LogFormat | None, output: IO[str], errors: IO[str]) -> None:
        self._format, self._output, self._errors = log_format, output, errors
        self._notes: set[str] = set()

    def note(self, text: str) -> None:
        """Write a note, once."""
        if text in self._notes or len(self._notes) >= _MOST_NOTES:
            return
        self._notes.add(text)
        if self._format == "json":
            self._write(event_line("note", {"text": text}))
        else:
            self._write(f"note: {one_line(text)}")

    def request(self, facts: RequestFacts) -> None:
        """Write a request that has ended."""
        if self._format == "json":
            self._write(event_line("request", asdict(facts)))
        elif self._format == "text":
            self._write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {one_line(str(facts))}")
        elif facts.status == HTTPStatus.FORBIDDEN and facts.reason is not None:
            self.note(f"a request is refused: {facts.reason}")

    def listening(self, urls: Sequence[str], prefix: str, has_page: bool) -> None:
        """Write the addresses of the server, of its API, and of its page for browsers."""
        url = urls[0].replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        clients_url = None if url.startswith("unix:") else f"{url}{prefix}/v1"
        page_url = f"{url}{prefix}/" if clients_url and has_page else None
        if self._format == "json":
            facts = {"url": urls[0], "clients_url": clients_url, "page_url": page_url}
            self._write(event_line("listening", facts))
            return
        self._output.writelines(f"listening on {url}\n" for url in urls)
        if self._format is not None and clients_url is not None:
            page = "" if page_url is None else f"; page for browsers: {page_url}"
            self._output.write(f"address for clients: {clients_url}{page}\n")
        self._output.flush()

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads the log any more
            self._errors.write(f"{line}\n")
            self._errors.flush()


def event_line(event: str, facts: Mapping[str, Any]) -> str:
    """Return a line of JSON for an event, with the time."""
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "event": event, **facts})
