"""Context managers that are closed when they are left."""

from typing import Self


class Closing:
    """A context manager that `close` ends."""

    __slots__ = ()

    def close(self) -> None:
        """End it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
