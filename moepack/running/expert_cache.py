"""Experts resident in memory for engines in Python, by the cache in C of `native/`."""

import ctypes
import errno
import operator
import os
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moepack.common.closing import Closing
from moepack.common.errors import SHORTAGE_HINTS, MachineError, PackError, RequestError
from moepack.common.sizes import Size
from moepack.pack.reading.directory import pack_path
from moepack.pack.reading.pack import Pack
from moepack.running.programs.library import find_library

# Enums of include/moepack_cache.h and moepack.h.
_CHECKS = ("first", "always", "never")
_BACKENDS = ("auto", "uring", "direct", "buffered")
_SYSTEM, _NO_SUCH, _BUFFER = 1, 6, 7

Parts = dict[str, memoryview]
"""The bytes of an expert's parts, by their full names."""


class CacheUsage(NamedTuple):
    """Counts since a cache was opened: lookups, bytes and seconds; and its memory now, in bytes.

    An expert that was prefetched is a miss of which nothing is read; `wasted_length` is of those
    that were not used next.
    """

    hit_count: int
    miss_count: int
    read_length: int
    wasted_length: int
    wait_seconds: float
    resident_length: int
    memory: int


class _Error(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_int),
        ("system_error", ctypes.c_int),
        ("message", ctypes.c_char * 256),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_uint64),
        ("policy", ctypes.c_char_p),
        ("family", ctypes.c_char_p),
        ("experts_used", ctypes.c_uint32),
        ("check", ctypes.c_int),
        ("reads", ctypes.c_int),
    )


class _OpenCache:
    """The cache in C, which stays open as long as anything views its memory."""

    def __init__(self, path: str | os.PathLike[str], options: _Options) -> None:
        self.path, self.address, self.process = path, ctypes.c_void_p(), os.getpid()
        self.library = ctypes.CDLL(str(find_library("cache")))
        self.call("open", os.fsencode(path), ctypes.byref(options), ctypes.byref(self.address))

    def call(self, name: str, *arguments: object) -> None:
        error = _Error()
        if not self.library[f"moepack_cache_{name}"](*arguments, ctypes.byref(error)):
            return
        kind: type[MachineError | PackError | RequestError] = PackError
        if error.code == _SYSTEM and error.system_error != errno.ENOENT:
            kind = MachineError
        elif error.code in (_NO_SUCH, _BUFFER):
            kind = RequestError
        hint = SHORTAGE_HINTS.get(error.system_error)
        raise kind(error.message.decode(errors="replace"), path=self.path, hint=hint)

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        if self.address and self.process == getpid():  # threads do not follow a fork
            self.library.moepack_cache_close(self.address)


class CacheContext(Closing):
    """A sequence of steps; each keeps its experts until the next."""

    def __init__(self, cache: "ExpertCache") -> None:
        self._cache, self._number, self._lock = cache, ctypes.c_uint32(), threading.Lock()
        opened = cache._require_open()
        opened.call("add_context", opened.address, ctypes.byref(self._number))
        self._is_open = True

    def use(self, layer: int, experts: Iterable[int], *, tokens: int = 1) -> list[Parts]:
        """Return the parts of each of `experts`, by name: read-only views of the cache's memory.

        They are the experts of `tokens` tokens, one token after the other, and all of as many. The
        views are theirs until the next `use`, `release` or `close` of the same context: after that
        they may become others', without an error. Waits for reads, and for room that other contexts
        take.

        Raises RequestError for a layer or an expert that is not there, PackError for a wrong digest
        or a short file, MachineError for a failed read; then the context has no experts, and the
        cache goes on.
        """
        numbers = self._cache._numbers(layer, experts)
        if tokens < 1 or len(numbers) % tokens:
            problem = f"{len(numbers)} experts are not as many for each token"
            raise RequestError(problem, argument="tokens", found=tokens)
        kinds, columns = self._cache.pack.parts(layer), len(numbers) // tokens
        addresses = (ctypes.c_void_p * (len(numbers) * len(kinds)))()
        with self._lock:
            opened = self._require_open()
            place = (opened.address, self._number, layer)
            opened.call("use", *place, numbers, tokens, columns, addresses)
        rest = iter(addresses)
        return [{one.name: _view(opened, next(rest), one.length) for one in kinds} for _ in numbers]

    def release(self) -> None:
        """Need none of the experts any more."""
        with self._lock:
            opened = self._require_open()
            opened.library.moepack_cache_release(opened.address, self._number)

    def close(self) -> None:
        """Release the experts, and end the context."""
        with self._lock:
            opened, is_open = self._cache._open, self._is_open
            self._is_open = False
            if is_open and opened is not None and opened.process == os.getpid():
                opened.library.moepack_cache_remove_context(opened.address, self._number)

    def _require_open(self) -> _OpenCache:
        opened = self._cache._require_open()
        if not self._is_open:
            raise RequestError("the context is closed")
        return opened


def _view(opened: _OpenCache, address: int, length: int) -> memoryview:
    array = (ctypes.c_ubyte * length).from_address(address)
    array.opened = opened  # type: ignore[attr-defined]
    return memoryview(array).cast("B").toreadonly()


def _experts_used(pack: Pack) -> int:
    source = pack.manifest.source
    used = (source.experts_used_in(pack.families(layer)[0], layer) or 0 for layer in pack.layers)
    return max(used, default=0)


class ExpertCache(Closing):
    """Experts of the pack or index in the folder `path`, within `memory` bytes, for computing.

    `memory` is a size, or a share of all experts, and at least the experts of two tokens in a
    layer, of which each uses `experts_used` (by default as the model says). `policy` evicts (see
    docs/policies.md); `check` compares experts with their digests `first`, `always` or `never`
    when they are read; `backend` is `auto`, `uring`, `direct` or `buffered`.

    May be used from several threads, each with a context of its own, in the process that made it.
    Its memory is given back once it is closed and no view of an expert is left. Raises RequestError
    for arguments, PackError, and MachineError without Linux or memory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        memory: Size,
        *,
        policy: str = "lrfu",
        check: str = "first",
        backend: str = "auto",
        experts_used: int | None = None,
    ) -> None:
        for name, value, names in (("check", check, _CHECKS), ("backend", backend, _BACKENDS)):
            if value not in names:
                expected = ", ".join(names)
                raise RequestError(f"no such {name}", expected=expected, found=repr(value))
        folder = pack_path(path)
        if folder is None:
            hint = "make an index over its shards: `moepack index MODEL.gguf -o NAME.moepack`"
            raise RequestError("a GGUF, not a pack", path=os.fspath(path), hint=hint)
        self.pack = Pack(folder)
        try:
            self.pack.require_files()
            self.pack.require_complete()
            choices = (_CHECKS.index(check), _BACKENDS.index(backend))
            used = experts_used or _experts_used(self.pack)
            options = _Options(self._length(memory), policy.encode(), None, used, *choices)
            self._open: _OpenCache | None = _OpenCache(folder, options)
            self._own = CacheContext(self)
        except BaseException:
            self.pack.close()
            raise

    def use(self, layer: int, experts: Iterable[int], *, tokens: int = 1) -> list[Parts]:
        """Return parts of experts as `CacheContext.use` does, in a context of the cache's own."""
        return self._own.use(layer, experts, tokens=tokens)

    def context(self) -> CacheContext:
        """Return a context for another sequence of steps; 62 may be open at once."""
        return CacheContext(self)

    def prefetch(self, layer: int, experts: Iterable[int]) -> None:
        """Begin to read experts that the next `use` likely needs, and end reading others so far.

        They take memory that nothing else needs.
        """
        numbers, opened = self._numbers(layer, experts), self._require_open()
        opened.call("prefetch", opened.address, layer, numbers, len(numbers))

    def resize(self, memory: Size) -> None:
        """Set other bytes for experts; those in use go when their context needs them no more."""
        opened = self._require_open()
        opened.call("resize", opened.address, ctypes.c_uint64(self._length(memory)))

    @property
    def usage(self) -> CacheUsage:
        """Lookups and reads since the cache was opened, and its memory now."""
        opened, counts = self._require_open(), (ctypes.c_uint64 * len(CacheUsage._fields))()
        opened.library.moepack_cache_count(opened.address, counts)
        hits, misses, read, wasted, waits, resident, memory = counts
        return CacheUsage(hits, misses, read, wasted, waits / 1e9, resident, memory)

    def close(self) -> None:
        """End it, and its contexts."""
        if self._open is not None:
            self._own.close()
            self._open = None
            self.pack.close()

    def _length(self, memory: Size) -> int:
        return min(self.pack.budget_length(memory, "memory"), 1 << 62)

    def _numbers(self, layer: int, experts: Iterable[int]) -> "ctypes.Array[ctypes.c_int32]":
        self._require_open()
        numbers, count = list(map(operator.index, experts)), self.pack.expert_count(layer)
        for number in numbers:
            if not 0 <= number < count:
                problem, expected = f"layer {layer} has no expert {number}", f"0 to {count - 1}"
                raise RequestError(problem, path=self.pack.path, expected=expected)
        return (ctypes.c_int32 * len(numbers))(*numbers)

    def _require_open(self) -> _OpenCache:
        if self._open is None:
            raise RequestError("the cache is closed")
        if self._open.process != os.getpid():
            raise RequestError("the cache belongs to the process that opened it: open it again")
        return self._open
