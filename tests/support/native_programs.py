"""The programs of tests/native: which files of `native/` each tests, and how it is run.

A program prints what it finds wrong, and nothing else but "no io_uring" where that is forbidden.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moepack.running.programs.compiling import SOURCES

CACHE = SOURCES["cache"]
CORE = (*(one for one in CACHE if one != "library"), "digest")
DECISIONS = ("residents", "prompts", "order", "slots")
MEMORY_AND_PLACE = "address,undefined"


class Program(NamedTuple):
    """`files` are of native/; `runs` are words, in which {folder} is an empty one, {pack} a pack's.

    The calls in `wrapped` are the program's own: they are cut short, and refused.
    """

    files: Sequence[str]
    runs: Sequence[str] = ("",)
    wrapped: Sequence[str] = ()
    sanitizers: Sequence[str] = (MEMORY_AND_PLACE,)


def _seeds(count: int) -> list[str]:
    return [f"{seed} {count}" for seed in range(10)]


PROGRAMS = {
    "beside": Program(CORE, ["{folder}"], ["madvise"]),
    "cache": Program(CORE, ["{folder}"], ["pread", "posix_fadvise"]),
    "drive": Program(["drive"], ["{folder}"], ["pread", "syscall"]),
    "failing_allocations": Program(
        CACHE,
        [f"{{pack}} {reads}" for reads in range(4)],
        ["malloc", "calloc", "memfd_create", "ftruncate", "mmap", "pthread_create", "syscall"],
    ),
    "guesses": Program(["guesses"]),
    "order": Program(["order"], _seeds(2000)),
    "pool": Program(["pool"], wrapped=["mmap"]),
    "prompts": Program(DECISIONS, _seeds(400)),
    "readers": Program(
        CORE,
        [
            f"{{folder}} {reads} {seed} 60 {fails}"
            for seed in range(3)
            for reads, fails in [(0, 0), (2, 0), (2, 1)]
        ],
        ["pread"],
        [MEMORY_AND_PLACE, "thread"],
    ),
    "residents": Program(DECISIONS),
    "simulation": Program(DECISIONS, _seeds(1000)),
    "slots": Program(["slots"]),
}
