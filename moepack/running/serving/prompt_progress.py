"""The progress of a prompt in a stream, between the events of llama.cpp's server.

The server tells it to clients that ask for it (`return_progress`), once a batch, which may take
half a minute. Between these, the tokens that were routed tell how far a batch is.
"""

import json
import time
from collections.abc import Callable
from typing import Any

_DATA, _END = b"data: ", b"\n\n"
_PROGRESS = "prompt_progress"


class PromptProgress:
    """Moves on the progress that a stream told last.

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
        self._last = _read(event) if piece.endswith(_END) else None
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


def _read(event: bytes) -> dict[str, Any] | None:
    """Return an event that tells the progress of a prompt, from JSON; else None."""
    if not event.startswith(_DATA) or _PROGRESS.encode() not in event:
        return None
    try:
        fields = json.loads(event.removeprefix(_DATA))
        numbers = [fields[_PROGRESS][name] for name in ("processed", "total", "time_ms")]
    except (ValueError, KeyError, TypeError):
        return None
    return fields if all(isinstance(number, int) for number in numbers) else None
