"""Selections that come a second time, whatever the format or the name that they come in."""

import numpy as np

from moepack import digest
from moepack.errors import RequestError
from moepack.trace.model import Counts, Item, Origin, Tokens


class Contents:
    """Notices files whose selections came before, in another.

    The two halves that hotness is judged by would be copies of each other, and anything would look
    as if it were worth pinning. What two models chose is never the same.
    """

    def __init__(self) -> None:
        self._before: dict[bytes, set[str | None]] = {}
        """The models that each digest was seen with."""
        self._in_file: list[tuple[bytes, str | None]] = []
        self._current = _ContentDigest()
        self._model: str | None = None

    def add(self, item: Item) -> None:
        """Take the next piece of a file."""
        if isinstance(item, Origin):
            self._end_origin()
            self._model = item.model
        else:
            self._current.add(item)

    def end(self, path: str) -> None:
        """Take the end of a file. Raises RequestError where all or some of it came before."""
        self._end_origin()
        for value, model in self._in_file:
            models = self._before.get(value, set())
            if models and (model is None or models & {None, model}):
                hint = "leave it out: a copy adds no information"
                raise RequestError("its selections came already", path=path, hint=hint)
        for value, model in self._in_file:
            self._before.setdefault(value, set()).add(model)
        self._in_file = []

    def _end_origin(self) -> None:
        value, self._current = self._current.value, _ContentDigest()
        if value is not None:
            self._in_file.append((value, self._model))


class _ContentDigest:
    """A digest of the selections of one origin, however they were cut into pieces."""

    def __init__(self) -> None:
        self._columns = [digest.stream() for _ in range(4)]
        self._is_empty = True

    def add(self, piece: Tokens | Counts) -> None:
        """Add the next piece."""
        numbers = np.diff(piece.starts) if isinstance(piece, Tokens) else piece.counts
        phase = piece.phase if isinstance(piece, Tokens) else np.full(1, piece.phase, np.uint8)
        for column, values in zip(
            self._columns, (numbers, phase, piece.layer, piece.expert), strict=True
        ):
            column.update(np.ascontiguousarray(values).data)
        self._is_empty &= not len(piece.layer)

    @property
    def value(self) -> bytes | None:
        """The digest; None of nothing."""
        return None if self._is_empty else b"".join(column.digest() for column in self._columns)
