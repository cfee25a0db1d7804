"""Arrays spilled to a temporary file, iterable repeatedly, in both directions."""

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moepack.common.closing import Closing
from moepack.common.errors import MachineError

Arrays = tuple[NDArray[Any], ...]


class Spool(Closing):
    """Keeps arrays out of memory, a group at a time. A context manager.

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
