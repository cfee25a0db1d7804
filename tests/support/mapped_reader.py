"""A program that maps a model and reads all of it: `python -m tests.support.mapped_reader MODEL`.

Each line of standard input is JSON for a call of `_compare`; each gets a line with the number of
pieces whose bytes are others than those of the file EXPECTED. The environment's library is used as
any program would use it: nothing is known of it here.
"""

import ctypes
import itertools
import json
import mmap
import os
import random
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
_LIBC.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t


def map_file(path: str, length: int) -> int:
    """Map the first `length` bytes of a file, which may be shorter; return the address."""
    descriptor = os.open(path, os.O_RDONLY)
    address = _LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    assert address is not None
    assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    os.close(descriptor)
    return int(address)


def _compare(address: int, expected: bytes, threads: int, passes: int) -> int:
    """Read all pieces in random orders, in several threads; return how many were others."""

    def read(seed: int) -> int:
        order = random.Random(seed)
        return sum(
            ctypes.string_at(address + start, end - start) != expected[start:end]
            for _ in range(passes)
            for start, end in _pieces(len(expected), order)
        )

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, range(threads)))


def _pieces(length: int, order: random.Random) -> Sequence[tuple[int, int]]:
    ends = [0, *sorted(order.sample(range(1, length), length // 5000)), length]
    pieces = list(itertools.pairwise(ends))
    order.shuffle(pieces)
    return pieces


def _compare_blocked(address: int, expected: bytes) -> int:
    """Compare in threads that block all signals, by the function that is for one thread alone."""
    every = ctypes.create_string_buffer(b"\xff" * 128)
    assert _LIBC.sigprocmask(signal.SIG_SETMASK, every, None) == 0
    return _compare(address, expected, 2, 1)


def _renew(path: str, address: int, expected: bytes, *, is_unmapped: bool) -> int:
    """Have other memory where the model was mapped, read the model elsewhere; return differences.

    Nothing may be asked after it.
    """
    assert not is_unmapped or _LIBC.munmap(address, len(expected)) == 0
    _cover(address, len(expected))
    place = map_file(path, len(expected))
    differing = _compare(place, expected, 2, 1)
    return differing + (not _is_covered(address, len(expected)))


def _cover(address: int, length: int) -> None:
    kinds = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    other = _LIBC.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, kinds, -1, 0)
    assert other == address
    ctypes.memset(address, 7, length)


def _is_covered(address: int, length: int) -> bool:
    return ctypes.string_at(address, length) == b"\x07" * length


def _cut(address: int, expected: bytes) -> int:
    """Have other memory in the midst of the model, and none at its end; return differences."""
    page, quarter = mmap.PAGESIZE, len(expected) // 4 // mmap.PAGESIZE * mmap.PAGESIZE
    assert _LIBC.munmap(address + 3 * quarter, len(expected) - 3 * quarter) == 0
    _cover(address + quarter, quarter - page + 1)  # up to the end of its last page
    differing = _compare(address, expected[:quarter], 2, 1)
    differing += _compare(address + 2 * quarter, expected[2 * quarter : 3 * quarter], 2, 1)
    return differing + (not _is_covered(address + quarter, quarter - page + 1))


def _crowd(address: int, expected: bytes) -> int:
    """Take nearly all maps that the system allows, then read; return differences."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    kinds = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    place = _LIBC.mmap(None, 2 * limit * mmap.PAGESIZE, mmap.PROT_READ, kinds, -1, 0)
    for number in range(limit):
        page = ctypes.c_void_p(place + 2 * number * mmap.PAGESIZE)
        if _LIBC.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
            break
    _LIBC.munmap(place, 64 * mmap.PAGESIZE)  # for Python itself
    return sum(
        ctypes.string_at(address + start, end - start) != expected[start:end]
        for start, end in _pieces(len(expected), random.Random(1))
    )


def _signal() -> int:
    """Handle and unblock a signal, as any program does; then end this one by another."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    assert _LIBC.sigaction(signal.SIGUSR1, None, ctypes.create_string_buffer(512)) == 0
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def _in_child(path: str, address: int, expected: bytes, *, anew: bool) -> int:
    """Read in a forked child what its parent has mapped, or map it anew; return how it ended.

    It ends with 0 where all is right, with 1 otherwise.
    """
    child = os.fork()
    if child == 0:
        place = map_file(path, len(expected)) if anew else address
        os._exit(int(_compare(place, expected, 1, 1) > 0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Map the model, and do what is asked."""
    model, expected_path = sys.argv[1:]
    expected = Path(expected_path).read_bytes()
    address = map_file(model, len(expected))
    print("ready", flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "compare":
            result = _compare(address, expected, *arguments)
        elif what in ("renew", "cover"):
            result = _renew(model, address, expected, is_unmapped=what == "renew")
        elif what == "cut":
            result = _cut(address, expected)
        elif what == "crowd":
            result = _crowd(address, expected)
        elif what == "blocked":
            with ThreadPoolExecutor(1) as pool:  # all inherit what this one blocks
                result = pool.submit(_compare_blocked, address, expected).result()
        elif what == "signal":
            result = _signal()
        elif what == "write":
            result = ctypes.memset(address + len(expected) - 1, 0, 1)
        else:
            result = _in_child(model, address, expected, anew=what == "fork anew")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
