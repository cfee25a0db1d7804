"""A server as a child process, until this process has no more use for it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, MoepackError
from moepack.running.serving.server import ENDS_WITH_INPUT

_LISTENING = re.compile(
    rb'^listening on (http\S+)\n|^.*"event": "listening", "url": "([^"]+)"', re.MULTILINE
)
_SECONDS_TO_END = 5.0
_SECONDS_BETWEEN = 0.01
_MAX_LOG_LENGTH = 1 << 20


class ListeningProcess(Closing):
    """A command that prints its address when it answers. A context manager, which ends it.

    `environment` is added to this process's. Its output and errors go to `log`, a file that is
    closed with it. The server ends with this process, even if that is killed, and Ctrl-C does not
    reach it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> None:
        self._url: str | None = None
        self._log = log
        self._searched_length = 0
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment, ENDS_WITH_INPUT: "1"},
                start_new_session=True,
            )
        except OSError as error:
            log.close()
            raise MachineError(f"cannot start the server: {error.strerror}") from None

    @property
    def process_id(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def url(self) -> str:
        """The server's address; waits until the model is loaded.

        Raises the error of `failure` if the server ends instead.
        """
        while self._url is None:
            has_ended = not self.is_running
            text = os.pread(self._log.fileno(), _MAX_LOG_LENGTH, self._searched_length)
            if (match := _LISTENING.search(text)) is not None:
                self._url = (match[1] or match[2]).decode()
            elif has_ended and len(text) < _MAX_LOG_LENGTH:
                raise self.failure()
            elif (length := text.rfind(b"\n") + 1) > 0:
                self._searched_length += length
            else:
                time.sleep(_SECONDS_BETWEEN)
        return self._url

    @property
    def returncode(self) -> int | None:
        """Its exit code, or -N if signal N killed it; None while it runs."""
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.returncode is None

    def failure(self) -> MoepackError:
        """Return the error for its end, after that."""
        return MachineError(f"the server ended with code {self.returncode}")

    def log(self, start: int = 0) -> str:
        """Return the end of its log, at most from the byte `start` on."""
        start = max(start, os.fstat(self._log.fileno()).st_size - _MAX_LOG_LENGTH)
        return os.pread(self._log.fileno(), _MAX_LOG_LENGTH, start).decode(errors="replace")

    def close(self) -> None:
        """End the server, without waiting for its answers."""
        assert self._process.stdin is not None
        self._process.terminate()  # while it loads, it does not look at its input
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        if self.is_running:
            self._process.kill()
            self._process.wait()
        self._log.close()
