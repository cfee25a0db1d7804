"""`python -m moepack.trace.recording.program`: a recorder for another process, which ends with it.

At a socket, whose descriptor is the argument, it gets what a `Recorder` takes, and then calls: a
name and arguments. To each it gives results until None, or an exception.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from moepack.trace.recording.recorder import Recorder


def _results(recorder: Recorder, name: str, arguments: Sequence[Any]) -> Iterator[Any]:
    if name == "tokenize":
        yield recorder.tokenize(*arguments)
        return
    prompt, count, options = arguments
    yield from recorder.generate(prompt, count, **options)


def _answer(connection: Connection, path: str, options: Mapping[str, Any]) -> None:
    with Recorder(path, **options) as recorder:
        connection.send(None)
        while True:
            name, *arguments = connection.recv()
            try:
                for result in _results(recorder, name, arguments):
                    connection.send(result)
                connection.send(None)
            except Exception as error:
                connection.send(error)


def main(descriptor: int) -> None:
    """Answer until the other side is closed."""
    with Connection(descriptor) as connection:
        try:
            _answer(connection, *connection.recv())
        except (EOFError, BrokenPipeError):
            return
        except Exception as error:
            connection.send(error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
