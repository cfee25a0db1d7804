"""Work that is divided: the files of one call's share, and tasks for an executor."""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from typing import TypeVar

from moepack.common.errors import MachineError, RequestError

T = TypeVar("T")

_SHARE = re.compile(r"\s*([0-9]{1,6})\s*/\s*([0-9]{1,6})\s*\Z", re.ASCII)


class Share:
    """Share `number` of `count`, from 1, as `3/16` or (3, 16); RequestError for anything else."""

    def __init__(self, part: str | tuple[int, int]) -> None:
        match = _SHARE.match(part) if isinstance(part, str) else None
        numbers = (int(match[1]), int(match[2])) if match else part
        if isinstance(numbers, str) or not 1 <= numbers[0] <= numbers[1]:
            raise RequestError(
                "not a part", argument="part", expected="3/16, from 1/16 to 16/16", found=repr(part)
            )
        self.number, self.count = numbers

    def names(self, lengths: Mapping[str, int]) -> list[str]:
        """Return the names of the files in this share, by the lengths of all.

        Each file is in one share alone, whoever computes it, and all shares have like lengths.
        """
        loads = [0] * self.count
        names = []
        for name in sorted(lengths, key=lambda name: (-lengths[name], name)):
            number = loads.index(min(loads))
            loads[number] += lengths[name]
            if number == self.number - 1:
                names.append(name)
        return sorted(names)


def run_tasks(
    executor: Executor, work: Callable[..., T], tasks: Sequence[tuple[object, ...]]
) -> Iterator[T]:
    """Call `work` with the arguments of each task; yield results as they come.

    A failure cancels the tasks that have not begun, and is raised; MachineError if the executor has
    lost its workers.
    """
    futures: list[Future[T]] = []
    run = secrets.token_hex(8)
    try:
        futures += (executor.submit(_do, run, work, arguments) for arguments in tasks)
        for future in as_completed(futures):
            yield future.result()
    except BrokenExecutor as error:
        hint = "run the same again with `resume=True`: finished files are skipped"
        raise MachineError(f"a worker died: {error}", hint=hint) from error
    finally:
        for future in futures:
            future.cancel()


def _do(run: str, work: Callable[..., T], arguments: tuple[object, ...]) -> T:
    """Call `work`; `run` makes a task of another run another task for a scheduler like Dask's."""
    return work(*arguments)
