"""Exit codes, and the report of an error."""

from enum import IntEnum

import click

from moepack.cli.shared.argument_names import as_typed, option_name
from moepack.cli.shared.terminal import complain
from moepack.common.errors import (
    MachineError,
    MoepackError,
    PackError,
    RequestError,
    SourceError,
    TraceError,
    shortage_behind,
)
from moepack.running.programs.executable import CommandError


class ExitCode(IntEnum):
    """The exit codes, as docs/commands/common.md lists them."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    SOURCE_FAULT = 3
    PACK_FAULT = 4
    DIFFERENCES = 5
    MACHINE_FAULT = 6
    INTERRUPTED = 130
    PIPE_CLOSED = 141


_CODES: tuple[tuple[type[MoepackError], ExitCode], ...] = (
    (RequestError, ExitCode.USAGE),
    (SourceError, ExitCode.SOURCE_FAULT),
    (TraceError, ExitCode.SOURCE_FAULT),
    (PackError, ExitCode.PACK_FAULT),
    (MachineError, ExitCode.MACHINE_FAULT),
    (MoepackError, ExitCode.FAILED),
)


class TerminatedError(KeyboardInterrupt):
    """The program was told to end (SIGTERM, SIGHUP), not merely interrupted."""


def report(error: MoepackError, command: click.Command | None = None) -> int:
    """Print an error of `command`, by default the running one, and hints; return its exit code."""
    command = command or click.get_current_context().command
    if error.argument is not None:
        error.argument = option_name(error.argument, command)
    error.problem = as_typed(error.problem, command)
    if isinstance(error.expected, str):
        error.expected = as_typed(error.expected, command)
    complain("error", str(error))
    shortage = shortage_behind(error) if isinstance(error, MachineError) else None
    first = None if shortage is None else shortage.hint
    for hint in dict.fromkeys((first, error.hint, *getattr(error, "__notes__", ()))):
        if hint:
            complain("hint", as_typed(hint, command, (error.path, error.found)))
    if isinstance(error, CommandError):
        return error.exit_code
    return next(code for kind, code in _CODES if isinstance(error, kind))
