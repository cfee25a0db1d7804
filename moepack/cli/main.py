"""The command line: its commands and groups, and the exit codes of errors."""

import atexit
import contextlib
import io
import mmap
import os
import re
import signal
import sys
import warnings
from typing import Any, NoReturn

import click

import moepack
from moepack.cli.bench import bench, tune
from moepack.cli.bench import report as report_command
from moepack.cli.copies import export, index, mirror, mount, pull, repair
from moepack.cli.experts import extract, include_dir, inspect, list_experts, locate, rank
from moepack.cli.launch import launch
from moepack.cli.models import models, ps
from moepack.cli.pack import pack, restore, verify
from moepack.cli.plan import doctor, forecast, machine, place
from moepack.cli.run import run as run_command
from moepack.cli.run import serve
from moepack.cli.shared.argument_names import as_typed
from moepack.cli.shared.exit_codes import ExitCode, TerminatedError, report
from moepack.cli.shared.terminal import complain
from moepack.cli.traces import hotness, simulate, trace
from moepack.cli.words.front import HELP_OPTIONS, Commands
from moepack.common.errors import MachineError, MoepackError, shortage_behind


@click.group(cls=Commands, context_settings={"help_option_names": list(HELP_OPTIONS)})
@click.version_option(moepack.__version__, prog_name="moepack")
def cli() -> None:
    """Run Mixture-of-Experts models that are bigger than your memory.

    A model is any one of its GGUF files, or their folder. For more: moepack help COMMAND.
    """


for _commands in (
    (inspect, pack, verify, locate, extract, include_dir, index, restore, list_experts, rank),
    (mirror, pull, repair, mount, export, run_command, serve, launch, ps, models, bench, tune),
    (trace, hotness, simulate, forecast, place, machine, doctor, report_command),
):
    for _command in _commands:
        cli.add_command(_command)


def _terminate(_signal: int, _frame: object) -> NoReturn:
    raise TerminatedError


def _replace_closed_streams() -> None:
    """Open closed streams (`>&-`) on nothing, else the next file opened takes their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for the whole run


def _warn(message: Warning | str, *_where: Any, **_options: Any) -> None:
    """Print a warning of the library as the commands print everything."""
    complain("note", str(message))


def main() -> None:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        signal.signal(signal.SIGHUP, _terminate)
    _replace_closed_streams()
    warnings.showwarning = _warn
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal has no letters for is escaped, not an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    _leave(run(sys.argv[1:]))


def _leave(code: int) -> NoReturn:
    """Exit with a code.

    Threads of a store's client may still touch objects of Python: while the interpreter ends, that
    would abort the process. So it ends at once if there are any, when all is written and closed.
    """
    if "obstore" in sys.modules:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):  # what reads the output has left
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


_RESERVE_LENGTH = 4 << 20
"""Bytes of address space for a report on a lack of memory: Python takes them by the MiB."""
_reserve = [mmap.mmap(-1, _RESERVE_LENGTH)]


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. MOEPACK_TRACEBACK=1 lets errors through."""
    if not _reserve:
        with contextlib.suppress(OSError, MemoryError):
            _reserve.append(mmap.mmap(-1, _RESERVE_LENGTH))
    try:
        result = cli.main(arguments, prog_name="moepack", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.UsageError as error:
        return _report_usage(error, arguments)
    except (KeyboardInterrupt, click.Abort) as stop:
        complain("error", "interrupted")
        for note in getattr(stop.__cause__ or stop, "__notes__", ()):
            complain("hint", as_typed(note, _named_command(arguments)[1]))
        return ExitCode.INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILED
    except Exception as error:
        if os.environ.get("MOEPACK_TRACEBACK"):
            raise
        while _reserve:
            _reserve.pop().close()
        return report(_translated(error), _named_command(arguments)[1])
    return result if isinstance(result, int) else 0


def _named_command(arguments: list[str]) -> tuple[str, click.Command]:
    """Return the name of the command, or the group, that the program's arguments name, and it."""
    path = "moepack"
    command: click.Command = cli
    for word in arguments:
        if not isinstance(command, click.Group) or word not in command.commands:
            break
        path, command = f"{path} {word}", command.commands[word]
    return path, command


def _translated(error: Exception) -> MoepackError:
    """Return an error as one of moepack's own."""
    if isinstance(error, MoepackError):
        return error
    if (shortage := shortage_behind(error)) is not None:
        return shortage
    if isinstance(error, OSError):
        return MachineError(error.strerror or str(error), path=error.filename)
    if isinstance(error, ImportError):
        hint = "install moepack again, with its dependencies"
        return MachineError(f"cannot import {error.name or 'a module'}: {error}", hint=hint)
    hint = "this is a bug in moepack: set MOEPACK_TRACEBACK=1 and report the output"
    return MoepackError(f"{type(error).__name__}: {error}", hint=hint)


def _report_usage(error: click.UsageError, arguments: list[str]) -> int:
    """Print what click says, examples if an argument is missing or too many, and the help."""
    path, command = _named_command(arguments)
    complain("error", " ".join(error.format_message().split()).removesuffix("."))
    if type(error) in (click.UsageError, click.MissingParameter):
        for example in re.findall("^ *Example: (.+)", command.help or "", re.MULTILINE):
            complain("hint", example)
    complain("hint", f"{path} --help")
    return ExitCode.USAGE
