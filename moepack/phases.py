"""Progress of work in phases, each of which knows its own total alone."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with what was done since its last call, and with what is to be done in all."""


class Phases:
    """Takes the progress of one phase after another on to `progress`, as that of a whole.

    What is done never exceeds the total, which grows where a phase begins; `later` is what is known
    of the phases to come.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0

    def begin(self, later: int = 0) -> Progress:
        """Return what takes the progress of the next phase."""
        before = self._done

        def advance(count: int, total: int) -> None:
            self._done += count
            if self._progress is not None:
                self._progress(count, before + total + later)

        return advance
