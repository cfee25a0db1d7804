"""A pool of threads on a machine that may have no more of them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from moepack.errors import MachineError

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose `submit` and `map` raise MachineError where no thread starts."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do as ThreadPoolExecutor does."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            hint = "use fewer --threads, or raise the limits on processes and memory (ulimit -a)"
            raise MachineError(str(error), hint=hint) from error
