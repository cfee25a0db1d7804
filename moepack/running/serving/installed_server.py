"""A llama-server that is installed, such as one with CUDA or Vulkan, as a child of the gate.

It listens on a socket in a folder that no other user may enter, and keys are checked by itself.
Its options are read here by name alone: another version may have options that ours does not know.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import h11

from moepack.common.errors import MachineError
from moepack.running.programs.command import CONTEXT, SLOTS, Option, llama_variables, without
from moepack.running.programs.process import Process
from moepack.running.serving.access import THIS_MACHINE
from moepack.running.serving.llama_server_options import DEFAULT_PORT
from moepack.running.serving.peer import Connection, fetch

PROGRAM = "--server"
"""The first word of the server's command, before the path of the program."""

_HOST = Option("--host", "LLAMA_ARG_HOST")
_PORT = Option("--port", "LLAMA_ARG_PORT")
_TLS_KEY = Option("--ssl-key-file", "LLAMA_ARG_SSL_KEY_FILE")
_TLS_CERTIFICATE = Option("--ssl-cert-file", "LLAMA_ARG_SSL_CERT_FILE")
_ORIGINS = Option("--cors-origins", "LLAMA_ARG_CORS_ORIGINS")
_REUSE_PORT = Option("--reuse-port", "LLAMA_ARG_REUSE_PORT")
_PING = Option("--sse-ping-interval", "LLAMA_ARG_SSE_PING_INTERVAL")
_MEDIA = Option("-mm --mmproj -mmu --mmproj-url", "LLAMA_ARG_MMPROJ")
_PREFIX = Option("--api-prefix", "LLAMA_ARG_API_PREFIX")
_NO_PAGE = Option("--no-ui --no-webui", "LLAMA_ARG_NO_UI")
_KEYS = (Option("--api-key", "LLAMA_API_KEY"), Option("--api-key-file", "LLAMA_ARG_API_KEY_FILE"))
_OF_THE_GATE = (_HOST, _PORT, _TLS_KEY, _TLS_CERTIFICATE, _ORIGINS)
_PLACES_OF_EXPERTS = (
    Option("-cmoe --cpu-moe", "LLAMA_ARG_CPU_MOE"),
    Option("-ncmoe --n-cpu-moe", "LLAMA_ARG_N_CPU_MOE"),
    Option("-ot --override-tensor", "LLAMA_ARG_OVERRIDE_TENSOR"),
)
_PING_SECONDS = 10
_SECONDS_BETWEEN = 0.1


class GateOptions(NamedTuple):
    """The options of llama-server that matter to the gate; 0 and empty if they are not set."""

    hosts: Sequence[str] = ("127.0.0.1",)
    port: int = DEFAULT_PORT
    shares_port: bool = False
    origins: str = THIS_MACHINE
    has_key: bool = False
    tls_key: str = ""
    tls_certificate: str = ""
    slot_count: int = 0
    context: int = 0
    has_media: bool = False
    ping_seconds: int = _PING_SECONDS
    prefix: str = ""
    has_page: bool = True


def read_gate_options(words: Sequence[str]) -> GateOptions:
    """Return what words for llama-server, or its variables, say to the gate."""
    usual, port, ping = GateOptions(), _PORT.integer(words), _PING.integer(words)
    hosts = [one.strip() for one in (_HOST.text(words) or "").split(",") if one.strip()]
    return GateOptions(
        hosts=hosts or usual.hosts,
        port=usual.port if port is None else port,
        shares_port=_REUSE_PORT.is_set(words),
        origins=_ORIGINS.text(words) or usual.origins,
        has_key=any(option.text(words) for option in _KEYS),
        tls_key=_TLS_KEY.text(words) or "",
        tls_certificate=_TLS_CERTIFICATE.text(words) or "",
        slot_count=SLOTS.number(words) or 0,
        context=CONTEXT.number(words) or 0,
        has_media=_MEDIA.is_set(words),
        ping_seconds=usual.ping_seconds if ping is None else ping,
        prefix=_PREFIX.text(words) or "",
        has_page=not _NO_PAGE.is_set(words),
    )


class InstalledServer:
    """The llama-server at `program`, which is started with `words`.

    `descriptor` is readable once it has ended. Raises CommandError and MachineError.
    """

    def __init__(self, program: Path, words: Sequence[str]) -> None:
        self._program = program
        self._health = f"{_PREFIX.text(words) or ''}/health".encode()
        try:
            self._folder = tempfile.mkdtemp(prefix="moepack-")
        except OSError as error:
            problem = f"no folder for a socket: {error.strerror}"
            raise MachineError(problem, hint="set TMPDIR to a folder that may be written") from None
        self._socket = os.path.join(self._folder, "llama.sock")
        # A warm-up would read the whole model.
        start = [str(program), "--host", self._socket, "--no-warmup"]
        others = [one for one in without(words, _OF_THE_GATE) if one not in _REUSE_PORT.words]
        try:
            self._process = Process(program, [*start, *others], _environment(words))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.descriptor = self._process.descriptor

    async def connect(self) -> Connection:
        """Connect to it."""
        return await asyncio.open_unix_connection(self._socket)

    async def wait_until_loaded(self) -> None:
        """Wait until the model is loaded; it may end before."""
        while not await self._is_loaded():
            await asyncio.sleep(_SECONDS_BETWEEN)

    async def _is_loaded(self) -> bool:
        try:
            status, _ = await fetch(await self.connect(), b"GET", self._health, [], b"")
            return status == HTTPStatus.OK
        except (OSError, h11.RemoteProtocolError):
            return False

    def close(self) -> tuple[int, str | None]:
        """End it, unless it has; return an exit code, and a sentence if it ended by itself."""
        code = self._process.poll()
        self._process.end()
        shutil.rmtree(self._folder, ignore_errors=True)
        if not code or code == -signal.SIGINT:
            return 0, None
        cause = f"with code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
        sentence = f"{self._program}: ended {cause}; the lines above say why"
        return code if code > 0 else 128 - code, sentence


def _environment(words: Sequence[str]) -> dict[str, str]:
    """Return the program's environment: experts on processors, into which they are read.

    Without a fit of the layers to memory, as if the whole model had to be there.
    """
    ours = {"LLAMA_ARG_FIT": "off", "LLAMA_ARG_LOG_VERBOSITY": "2"}
    ours |= {_ORIGINS.variable: THIS_MACHINE, _PING.variable: str(_PING_SECONDS)}
    if not any(option.is_set(words) for option in _PLACES_OF_EXPERTS):
        ours["LLAMA_ARG_CPU_MOE"] = "1"
    gate = {option.variable for option in (*_OF_THE_GATE, _REUSE_PORT)}
    names = {name: value for name, value in os.environ.items() if name not in gate}
    return {**llama_variables(words), **ours, **names}
