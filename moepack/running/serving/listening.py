"""A server as a child process, until this process has no more use for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, MoepackError
from moepack.running.serving.server import ENDS_WITH_INPUT

_LISTENING = "listening on "
_SECONDS_TO_END = 5.0
_MAX_LOG_LENGTH = 1 << 20


class ListeningProcess(Closing):
    """A command that prints its address when it answers. A context manager, which ends it.

    `environment` is added to this process's. Standard error goes to `log`, which is closed with it.
    The server ends with this process, even if that is killed, and Ctrl-C does not reach it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> None:
        self._url: str | None = None
        self._log = log
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
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
        if self._url is None:
            assert self._process.stdout is not None
            lines = map(bytes.decode, self._process.stdout)
            address = next((line for line in lines if line.startswith(_LISTENING)), None)
            if address is None:
                self._process.wait()
                raise self.failure()
            self._url = address.removeprefix(_LISTENING).rstrip()
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
        """Return the end of its standard error, at most from the byte `start` on."""
        start = max(start, os.fstat(self._log.fileno()).st_size - _MAX_LOG_LENGTH)
        return os.pread(self._log.fileno(), _MAX_LOG_LENGTH, start).decode(errors="replace")

    def close(self) -> None:
        """End the server, without waiting for its answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.terminate()  # while it loads, it does not look at its input
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        if self.is_running:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
