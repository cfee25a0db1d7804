"""Reports of work: its progress in phases, and the bytes that it compared with their digests."""

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Called with the work done since its last call, in bytes or items, and with that in all."""


def advancing(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that calls `progress` with its argument and `total`."""

    def advance(count: int) -> None:
        if progress is not None:
            progress(count, total)

    return advance


class Phases:
    """Passes the progress of one phase after another on to `progress`, as that of a whole.

    The work done never exceeds the total, which grows when a phase begins; `later` is the known
    work of the phases to come.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0

    def begin(self, later: int = 0) -> Progress:
        """Return the progress function of the next phase."""
        before = self._done

        def advance(count: int, total: int) -> None:
            self._done += count
            if self._progress is not None:
                self._progress(count, before + total + later)

        return advance


@dataclass(frozen=True, slots=True)
class DigestCounts:
    """Bytes of parts, tensors and headers that a command has written, kept or shared.

    `known_length` are those with a known digest, `unknown_length` the others. Only code that has
    computed digests in this run, and found them equal, adds to `compared_length`.
    """

    known_length: int = 0
    unknown_length: int = 0
    compared_length: int = 0
