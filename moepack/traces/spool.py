"""Arrays and traces in temporary files, to go through several times.

Pipes can be read only once, and a trace may be longer than memory. How often it is gone through,
for which layers, and in which batches, only the calls know that it is passed to.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, RequestError
from moepack.common.shape import ModelShape
from moepack.traces.model import Counts, Item, Origin, Tokens

Arrays = tuple[NDArray[Any], ...]


class Spool(Closing):
    """Keeps groups of arrays out of memory, to be read in both directions. A context manager.

    Raises MachineError if there is no space for its file.
    """

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="moepack-")  # noqa: SIM115  # closed on exit
        except OSError as error:
            raise _no_space(error) from error
        self._starts: list[int] = []
        self._width = 0

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def add(self, arrays: Arrays) -> None:
        """Add a group, of as many arrays as those before it."""
        self._width = len(arrays)
        try:
            self._starts.append(self._file.seek(0, os.SEEK_END))
            for array in arrays:
                np.save(self._file, array)
            self._file.flush()
        except OSError as error:
            raise _no_space(error) from error

    def __iter__(self) -> Iterator[Arrays]:
        return map(self._read, self._starts)

    def __reversed__(self) -> Iterator[Arrays]:
        return map(self._read, reversed(self._starts))

    def _read(self, start: int) -> Arrays:
        self._file.seek(start)
        return tuple(np.load(self._file) for _ in range(self._width))


def _no_space(error: OSError) -> MachineError:
    return MachineError(
        f"cannot keep a trace: {error.strerror}",
        path=tempfile.gettempdir(),
        hint="TMPDIR names a folder with more space",
    )


class SpooledTrace(Closing):
    """The checked pieces of a trace: its tokens are in a temporary file. A context manager.

    `paths` are the files. `shape` is that of the model they were checked against, None without
    one. `warnings` counts items left out, by problem.
    """

    def __init__(self, paths: Sequence[str], shape: ModelShape | None) -> None:
        self.paths = tuple(paths)
        self.shape = shape
        self.warnings: Counter[str] = Counter()
        self._spool = Spool()
        self._others: list[Origin | Counts | None] = []
        """The pieces without tokens, and None for each group of tokens."""

    def close(self) -> None:
        """Remove the temporary file."""
        self._spool.close()

    @property
    def has_tokens(self) -> bool:
        """Whether selections of single tokens are among them, not only counts."""
        return None in self._others

    def add(self, item: Item) -> None:
        """Add the next piece. Raises MachineError if there is no space for it."""
        if isinstance(item, Tokens):
            self._spool.add(item)
        self._others.append(None if isinstance(item, Tokens) else item)

    def feed(self, *consumers: Callable[[Item], object]) -> Counter[str]:
        """Hand each piece to all consumers, and return the warnings. Raises what they raise."""
        tokens = map(Tokens._make, self._spool)
        for other in self._others:
            item = next(tokens) if other is None else other
            for consume in consumers:
                consume(item)
        return Counter(self.warnings)

    def require(self, shape: ModelShape | None) -> None:
        """Raise RequestError if a shape is given and the trace was not checked against it."""
        if shape is not None and shape != self.shape:
            problem = "the trace was read for another model"
            raise RequestError(problem, path=self.paths[0], expected=shape, found=self.shape)
