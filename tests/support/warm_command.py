"""The command in processes that find moepack loaded, as they are forks of one that has loaded it.

Each is a process of its own, with pipes, an environment and an exit code: what it does not do is to
import, which takes most of the time of a short command.
"""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.all_of_moepack"])


def run(
    arguments: list[str], given: str | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run the command with `given` on standard input. Raises subprocess.TimeoutExpired."""
    theirs, feed = _CONTEXT.Pipe(duplex=False)
    out, their_out = _CONTEXT.Pipe(duplex=False)
    error, their_error = _CONTEXT.Pipe(duplex=False)
    streams = theirs, their_out, their_error
    process = _CONTEXT.Process(
        target=_main, args=(arguments, os.getcwd(), dict(os.environ), streams)
    )
    process.start()
    for end in streams:
        end.close()
    with ThreadPoolExecutor(3) as pool:
        pool.submit(_write, feed, (given or "").encode())
        said = [pool.submit(_read, end) for end in (out, error)]
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout)
    texts = (one.result().decode() for one in said)
    return subprocess.CompletedProcess(arguments, process.exitcode, *texts)


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
