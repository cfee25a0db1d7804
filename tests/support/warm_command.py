"""Commands and calls in processes that find moepack loaded: forks of one that has loaded it.

Each is a process of its own, with pipes, an environment and an exit code: what it does not do is to
import, which takes most of the time of a short command.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any, TypeVar, cast

from tests.support.children import PATIENCE

Result = TypeVar("Result")

Run = Callable[..., subprocess.CompletedProcess[Any]]
"""Runs the command, as the fixture `cli` does."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.all_of_moepack"])


OPTIONS = {"input", "stdin", "timeout", "text", "cwd"}
"""Those of the options of `subprocess.run` that are kept here."""


def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run the command, with `OPTIONS` as subprocess.run has them. Raises TimeoutExpired as that."""
    theirs, feed = _CONTEXT.Pipe(duplex=False)
    if "stdin" in options:
        theirs.close()
        theirs = _copy(options["stdin"])
    out, their_out = _CONTEXT.Pipe(duplex=False)
    error, their_error = _CONTEXT.Pipe(duplex=False)
    streams = theirs, their_out, their_error
    folder = os.fspath(options.get("cwd") or os.getcwd())
    process = _CONTEXT.Process(target=_main, args=(arguments, folder, dict(os.environ), streams))
    process.start()
    for end in streams:
        end.close()
    given = options.get("input") or b""
    timeout = options.get("timeout", 120.0)
    with ThreadPoolExecutor(3) as pool:
        pool.submit(_write, feed, given if isinstance(given, bytes) else given.encode())
        said = [pool.submit(_read, end) for end in (out, error)]
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout)
    data = [one.result() for one in said]
    results = [one.decode() for one in data] if options.get("text", True) else data
    return subprocess.CompletedProcess(arguments, process.exitcode, *results)


def json_of(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON that a command printed, which ended well."""
    assert run.returncode == 0, run.stderr
    facts: dict[str, Any] = json.loads(run.stdout)
    return facts


def call(work: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a function of a module returns in such a process; fail where it fails."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_call, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    with ours:
        if not ours.poll(PATIENCE):
            process.kill()
            raise TimeoutError(f"not done after {PATIENCE} s")
        try:
            result, problem = ours.recv()
        except EOFError:
            process.join()
            problem = f"the process ended with {process.exitcode}"
    process.join()
    assert not problem, problem
    return cast(Result, result)


def _call(end: Connection, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    try:
        answer = work(*arguments), ""
    except BaseException:
        answer = None, traceback.format_exc()
    end.send(answer)


def _copy(stream: int | IO[Any]) -> Connection:
    """Return a copy of a file that multiprocessing hands over; of no file where it is DEVNULL."""
    if isinstance(stream, int):
        assert stream == subprocess.DEVNULL
        return Connection(os.open(os.devnull, os.O_RDWR))
    return Connection(os.dup(stream.fileno()))


def _main(
    arguments: list[str], folder: str, environment: dict[str, str], streams: tuple[Connection, ...]
) -> None:
    from moepack.cli.main import main

    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    # As Python opens them; what the server opened was something else.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["moepack", *arguments]
    main()


def _write(end: Connection, data: bytes) -> None:
    # A command need not read all of it.
    with end, suppress(BrokenPipeError), open(end.fileno(), "wb", closefd=False) as file:
        file.write(data)


def _read(end: Connection) -> bytes:
    with end, open(end.fileno(), "rb", closefd=False) as file:
        return file.read()
