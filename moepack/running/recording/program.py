"""`python -m moepack.running.recording.program`: a recorder for another process, ending with it.

At a socket, whose descriptor is the argument, it gets the arguments of a `Recorder`, and then
calls: a name and arguments. To each it sends results until None, or an exception.
"""

import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from moepack.running.recording.recorder import Recorder


def _answer(connection: Connection, path: str, options: Mapping[str, Any]) -> None:
    with Recorder(path, **options) as recorder:
        connection.send(None)
        while True:
            name, *arguments = connection.recv()
            try:
                if name == "tokenize":
                    connection.send(recorder.tokenize(*arguments))
                else:
                    prompt, count, keywords = arguments
                    for tokens in recorder.generate(prompt, count, **keywords):
                        connection.send(tokens)
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
