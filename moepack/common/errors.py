"""Errors by fault: of the source, the trace, the pack, the request, the machine.

A message names file, place, problem, and the expected and actual value; the hint says what to do
next. A broken promise inside moepack is an assertion, never one of these.
"""

import errno
import os
from enum import StrEnum
from typing import Any

from moepack.common.escaping import one_line, shorten


class ErrorCode(StrEnum):
    """Reasons by which callers decide what to do."""

    UNKNOWN_FORMAT = "unknown-format"
    """The pack is of another format, or needs what this version does not know."""
    NOT_REGULAR = "not-regular"
    """The path is no regular file: a pipe, a device, a directory."""
    NOT_GGUF = "not-gguf"
    PACK_EXISTS = "pack-exists"
    """A whole pack is where another is to be written."""


class MoepackError(Exception):
    """The base of every error that moepack raises on purpose.

    `path` is the file, `place` the spot in it (a tensor, a field, `byte 1234`), `argument` the
    argument of the call at fault, `hint` the next step for a person. `str(error)` is one line
    without the hint. `expected` and `found` are values or their text; lengths are text, with their
    unit. `code` is for programs that decide by the reason: texts may be reworded at any time.

    Texts name arguments of the call in backquotes, with a value or without: `resume=True`,
    `memory`. The command line replaces them by its options.
    """

    def __init__(
        self,
        problem: str,
        *,
        path: str | os.PathLike[str] | None = None,
        place: str | None = None,
        argument: str | None = None,
        expected: Any = None,
        found: Any = None,
        hint: str | None = None,
        code: ErrorCode | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = None if path is None else os.fspath(path)
        self.place = place
        self.argument = argument
        self.expected = expected
        self.found = found
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        where = [] if self.path is None else [one_line(self.path)]
        if self.argument is not None:
            where.append(self.argument)
        if self.place is not None:
            where.append(shorten(self.place))
        message = ": ".join([*where, shorten(self.problem)])
        if self.expected is not None:
            message += f", expected {shorten(_grouped(self.expected))}"
        if self.found is not None:
            message += f", found {shorten(_grouped(self.found))}"
        return message


def _grouped(value: object) -> object:
    """Write a number as people read it: `17,408`."""
    return f"{value:,}" if type(value) is int and abs(value) < 1 << 64 else value


class SourceError(MoepackError):
    """The source model is at fault: a shard, or how the shards fit together."""


class TraceError(MoepackError):
    """A trace or hotness file is at fault, or was recorded on another model."""


class PackError(MoepackError):
    """The pack is at fault: incomplete, damaged, or of a version this reader does not know."""


class RequestError(MoepackError):
    """The caller asked for something impossible or absent: an argument, a layout, a key."""


class MachineError(MoepackError):
    """This machine cannot do it: no space, no permission, a device that fails."""


class MirrorWarning(UserWarning):
    """The mirror of a pack is not read, or no longer: all reads go to the pack itself."""


_NO_MEMORY = "free memory, or raise the limits on it (ulimit -v, ulimit -l)"
SHORTAGE_HINTS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the system's table of open files is full: end other programs",
    errno.ENOMEM: _NO_MEMORY,
    errno.ENOBUFS: _NO_MEMORY,
}
"""Remedies for shortages, by errno."""

_LOADER_ERRORS = {
    os.strerror(errno.EMFILE): errno.EMFILE,
    os.strerror(errno.ENFILE): errno.ENFILE,
    os.strerror(errno.ENOMEM): errno.ENOMEM,
    "failed to map segment": errno.ENOMEM,
}
"""Messages of the dynamic loader (dlopen(3)), which has no numbers for them."""
_NO_THREADS = "can't start new thread"
NO_THREADS_HINT = "use fewer `threads`, or raise the limits on processes and memory (ulimit -a)"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FAILED_READS = (errno.EIO, errno.EACCES, errno.ECONNRESET, errno.EPROTO)
"""Failures of a drive, a store or the way to it, and its permissions."""
_NO_EXCEPTION = ("without setting an exception", "without exception set")


def is_of_machine(error: OSError) -> bool:
    """Return whether a file could not be read for reasons that say nothing of its bytes."""
    return error.errno in SHORTAGE_HINTS or error.errno in _FAILED_READS


def shortage_behind(error: BaseException) -> MachineError | None:
    """Return the error for a shortage of the machine that led to `error`, if there was one."""
    link: BaseException | None = error
    visited: set[int] = set()
    while link is not None and id(link) not in visited:
        if (shortage := _shortage(link)) is not None:
            return shortage
        visited.add(id(link))
        link = link.__cause__ or link.__context__
    return None


def _shortage(error: BaseException) -> MachineError | None:
    # Parts of CPython in C may find no memory, and not say so.
    is_silent = isinstance(error, SystemError) and any(t in str(error) for t in _NO_EXCEPTION)
    if isinstance(error, MemoryError) or is_silent:
        return MachineError("not enough memory", hint=_NO_MEMORY)
    if isinstance(error, RuntimeError) and str(error) == _NO_THREADS:
        return MachineError(_NO_THREADS, hint=NO_THREADS_HINT)
    if not isinstance(error, OSError | ImportError):
        return None
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        number = next((n for text, n in _LOADER_ERRORS.items() if text in str(error)), None)
    if number not in SHORTAGE_HINTS:
        return None
    path = error.filename if isinstance(error, OSError) else None
    problem = "not enough memory" if number == errno.ENOMEM else os.strerror(number)
    return MachineError(problem, path=path, hint=SHORTAGE_HINTS[number])


def read_failure(
    error: OSError,
    path: str | os.PathLike[str],
    fault: type[MoepackError],
    place: str | None = None,
) -> MoepackError:
    """Return the error for a file that could not be read: a `fault`, or MachineError.

    It is the machine's if it ran short of something, if its drive or a store fails, or forbids it.
    """
    kind, hint = (MachineError if is_of_machine(error) else fault), remedy(error)
    if isinstance(error, FileNotFoundError):
        from moepack.common.path_hints import missing_hint

        hint = missing_hint(path)
    return kind(f"cannot read: {error.strerror}", path=path, place=place, hint=hint)


def open_failure(error: OSError, path: str | os.PathLike[str]) -> MachineError:
    """Return the error for a file that could not be opened."""
    return MachineError(f"cannot open: {error.strerror}", path=path, hint=remedy(error))


def remedy(error: OSError) -> str | None:
    """Return the hint that an error of a store has, None of others."""
    hint: str | None = getattr(error, "hint", None)
    return hint


def write_failure(
    error: OSError, path: str | os.PathLike[str], hint: str | None = None
) -> MachineError:
    """Return the error for a failed write at `path`; `hint` says how to go on."""
    problem, path = f"cannot write: {error.strerror}", error.filename or path
    if error.errno in _NO_SPACE:
        problem = "no space left"
        hint = "free some space" if hint is None else f"free some space, then {hint}"
    return MachineError(problem, path=path, hint=hint)
