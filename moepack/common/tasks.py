"""Tasks for an executor, on this machine or on many."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from typing import TypeVar

from moepack.common.errors import MachineError

T = TypeVar("T")


def run_tasks(
    executor: Executor, work: Callable[..., T], tasks: Sequence[tuple[object, ...]]
) -> Iterator[T]:
    """Call `work` with the arguments of each task; yield results as they come.

    A failure cancels the tasks that have not begun, and is raised; MachineError if the executor has
    lost its workers.
    """
    futures: list[Future[T]] = []
    try:
        futures += (executor.submit(work, *arguments) for arguments in tasks)
        for future in as_completed(futures):
            yield future.result()
    except BrokenExecutor as error:
        hint = "run the same again with `resume=True`: finished files are skipped"
        raise MachineError(f"a worker died: {error}", hint=hint) from error
    finally:
        for future in futures:
            future.cancel()
