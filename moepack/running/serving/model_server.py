"""A server as a child process: `serve`'s, llama.cpp's alone, or with experts read on demand."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

from moepack.common.closing import Closing
from moepack.common.errors import MachineError, MoepackError, RequestError, SourceError
from moepack.common.sizes import Size
from moepack.host.memory_limits import kill_count, limit_text
from moepack.pack.reading.pack import Pack
from moepack.running.programs.command import micro_batch
from moepack.running.programs.executable import check_executable
from moepack.running.programs.learned import Learner
from moepack.running.programs.process import is_out_of_memory
from moepack.running.programs.runner import (
    open_supervisor,
    preloaded_library,
    program_environment,
    serving,
    write_selections,
)
from moepack.running.programs.trace_writer import TraceWriter
from moepack.running.serving import server
from moepack.running.serving.client import ServerClient
from moepack.running.serving.installed_server import PROGRAM
from moepack.running.serving.prompt_cache import prompt_cache_variables
from moepack.running.streaming.control import ExpertUsage
from moepack.running.streaming.supervisor import StreamingOptions

API_KEY = "LLAMA_API_KEY"
"""llama-server's variable: unlike an option, other users of the machine do not see it."""
_FAULTS: Mapping[int, type[MoepackError]] = {1: RequestError, 2: RequestError, 3: SourceError}
"""By exit codes: ours, and llama.cpp's 1 for some options."""
_LOGGED_ERROR = re.compile(r"^[0-9.]+ E (?:\S+ +)?\S+: +(.*)$", re.MULTILINE)
_OTHER_ERROR = re.compile(r"^(?:error: )?((?<=error: ).*|error while .*)$", re.MULTILINE)
_REFUSED_TEMPLATE = re.compile(r"the supplied chat template is not supported: (.*)")
_LISTENING = re.compile(rb"^listening on (http\S+)\n", re.MULTILINE)
_SECONDS_TO_END = 5.0
_SECONDS_BETWEEN_LOOKS = 0.01
_MAX_LOG_LENGTH = 1 << 20
_LEFT = "nobody waits for this text any more"
"""A line of llama.cpp by native/server.c, after a step that failed on purpose."""


def server_command(program: Path | None = None) -> list[str]:
    """Return the start of a server's command: of ours, or of an installed llama-server.

    llama-server's options follow. Raises CommandError if no library can be loaded into `program`.
    """
    command = [sys.executable, "-m", server.__name__]
    if program is None:
        return command
    check_executable(program)
    return [*command, PROGRAM, str(program)]


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
                env={**os.environ, **environment, server.ENDS_WITH_INPUT: "1"},
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
                self._url = match[1].decode()
            elif (length := text.rfind(b"\n") + 1) > 0:
                self._searched_length += length
            elif has_ended:
                raise self.failure()
            else:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
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


class ServerProcess(ListeningProcess):
    """llama.cpp's server for the model at `model_path`. A context manager, which ends it.

    `options` are llama-server's, `environment` is added to this process's. It listens on this
    machine alone, on a free port unless `options` name one. All clients must send `api_key`, by
    default the value of LLAMA_API_KEY. `prefix` is a command that starts another, such as `nice`.
    """

    def __init__(
        self,
        model_path: str,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] = {},
        api_key: str | None = None,
        prefix: Sequence[str] = (),
        program: Path | None = None,
    ) -> None:
        variables = {**environment} if api_key is None else {**environment, API_KEY: api_key}
        self._api_key = variables.get(API_KEY, os.environ.get(API_KEY)) or None
        self._request_start, self._kills_before = 0, kill_count()
        command = [*prefix, *server_command(program), "-m", model_path]
        log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the server
        super().__init__([*command, "--port", "0", *options], variables, log)

    @property
    def client(self) -> ServerClient:
        """A client of the server; waits as `url` does."""
        return ServerClient(self.url, self._api_key, self.problem, self._begin_request)

    def processor_seconds(self) -> float:
        """Return the processor time that it took; 0 if the system does not tell."""
        try:
            fields = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return 0.0

    def problem(self) -> str | None:
        """Return why the server has ended; None while it runs."""
        return None if self.is_running else str(self.failure())

    def _begin_request(self) -> None:
        with contextlib.suppress(ValueError):  # closed
            # An error of an earlier request is not the cause of an end.
            self._request_start = os.fstat(self._log.fileno()).st_size

    def failure(self) -> MoepackError:
        """Return the error for its end: a RequestError, SourceError or MachineError."""
        log, code = self.log(self._request_start), self.returncode
        assert code is not None
        log = log.rpartition(_LEFT)[2]
        if (template := _REFUSED_TEMPLATE.search(log)) is not None:
            return RequestError(
                "llama.cpp cannot use the chat template",
                found=template[1],
                hint="it must be Jinja that llama.cpp understands, or one of its names",
            )
        if is_out_of_memory(code, self._kills_before):
            return MachineError(
                f"llama.cpp's server was killed, out of memory: {limit_text()}",
                hint="less `memory` for experts, or a shorter `context`",
            )
        match = _LOGGED_ERROR.search(log) or _OTHER_ERROR.search(log)
        words = [f"ended by {signal.Signals(-code).name}"] if code < 0 else []
        if match is not None:
            words.append(match[1])
        return _FAULTS.get(code, MachineError)(
            f"llama.cpp's server: {', '.join(words) or f'ended with code {code}'}"
        )


class ModelServer(ServerProcess):
    """Serves the model of `pack`, which has to stay open. A context manager, which ends the server.

    `options` are llama-server's: `-c 8192`, `-np 4`, `--port 8080`; the default port is a free one.
    All clients must send `api_key`, by default the value of LLAMA_API_KEY. `trace` and `learner`
    get the routed experts, or with `records` the supervisor keeps them for `pop_calls`. `program`
    is an installed llama-server in place of ours. Ours keeps the states of texts on disk, in
    `prompt_cache` bytes; None is the usual number.

    Raises what `Supervisor` and `ServerProcess` raise.
    """

    def __init__(
        self,
        pack: Pack,
        streaming_options: StreamingOptions,
        *,
        options: Sequence[str] = (),
        api_key: str | None = None,
        trace: TraceWriter | None = None,
        learner: Learner | None = None,
        records: bool = False,
        program: Path | None = None,
        prompt_cache: Size | None = 0,
    ) -> None:
        self._expert_failure: MoepackError | None = None
        self.pack, self.policy = pack, streaming_options.policy
        self.micro_batch = micro_batch(options)
        with ExitStack() as stack:
            library = preloaded_library()
            receivers = self._keep, trace, learner
            self.supervisor = stack.enter_context(
                open_supervisor(pack, streaming_options, options, *receivers, records=records)
            )
            write = partial(write_selections, self.supervisor, trace, learner)
            stack.callback(write, is_last=True)
            stack.enter_context(serving(self.supervisor, write))
            variables = prompt_cache_variables(pack, prompt_cache)
            environment = program_environment(self.supervisor, library, variables)
            path = self.supervisor.model_path
            super().__init__(
                path, options=options, environment=environment, api_key=api_key, program=program
            )
            self._resources = stack.pop_all()

    def _keep(self, error: MoepackError) -> None:
        self._expert_failure = error

    def close_afterwards(self, resources: ExitStack) -> None:
        """Close resources when the server has ended."""
        resources.push(self._resources)
        self._resources = resources

    def close(self) -> None:
        """End the server, and free the memory of all experts."""
        with self._resources:
            super().close()

    @property
    def usage(self) -> ExpertUsage:
        """The lookups and reads of experts so far."""
        return self.supervisor.usage

    @contextlib.contextmanager
    def expert_failures(self) -> Iterator[None]:
        """Raise the error of the experts that stopped a text, in place of the server's own."""
        self._expert_failure = None
        try:
            yield
        except MachineError as error:
            self.supervisor.read_programs()  # one may be there that was not read yet
            raise self._expert_failure or error from None
