"""Threads that work on the same thing at the same time."""

import threading
from collections.abc import Callable

from tests.support.children import PATIENCE


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call `work` with each number below `count`, each in a thread; raise the first error."""
    problems: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"not done after {PATIENCE} s"
    if problems:
        raise problems[0]
