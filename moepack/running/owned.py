"""What holds resources until it is closed or dropped, and only in the process that made it."""

import os
import weakref
from contextlib import ExitStack
from typing import Self

from moepack.errors import RequestError


class Owned:
    """A context manager that frees what was given to `_own`, once.

    A forked child has neither the threads of what it copied nor a right to free it: there nothing
    is closed, and `_check_open` refuses. `_own_name` is what messages call it.
    """

    _own_name = "object"

    def _own(self, stack: ExitStack) -> None:
        """Take what `stack` holds, which must not hold this."""
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _close_in, self._process, stack.pop_all())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all that it holds."""
        self._finalizer()

    def _check_open(self) -> None:
        """Raise RequestError where it is closed, or another process's."""
        if os.getpid() != self._process:
            problem = f"the {self._own_name} belongs to the process that this one was forked from"
            raise RequestError(problem, hint="make another in the child")
        if not self._finalizer.alive:
            raise RequestError(f"the {self._own_name} is closed")


def _close_in(process: int, stack: ExitStack) -> None:
    if os.getpid() == process:
        stack.close()
