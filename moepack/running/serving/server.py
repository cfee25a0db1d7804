"""llama.cpp's own server, from the wheel: `python -m moepack.running.serving.server -m MODEL …`.

Options and variables are those of `llama-server`. The server itself listens on a socket without an
address; clients reach the gate before it. With `--server PROGRAM` as the first words, the gate is
before that llama-server.
"""

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from moepack.common.errors import MachineError, MoepackError, RequestError, SourceError
from moepack.running.programs.command import USUAL_SLOTS
from moepack.running.programs.executable import find_executable
from moepack.running.serving.access import THIS_MACHINE, Access
from moepack.running.serving.admission import Turns
from moepack.running.serving.gate import Gate, GateLimits
from moepack.running.serving.installed_server import (
    PROGRAM,
    GateOptions,
    InstalledServer,
    read_gate_options,
)
from moepack.running.serving.llama_server_options import parse_options
from moepack.running.serving.peer import Connection
from moepack.running.serving.prompt_cache import open_prompt_files
from moepack.running.serving.prompt_states import PromptStates, make_asker
from moepack.running.serving.running_servers import ServerFile
from moepack.running.serving.served_model import Watched
from moepack.running.serving.server_log import ServerLog
from moepack.running.serving.watch import Watch
from moepack.running.streaming.control import CacheStatistics, Control
from moepack.storage.libc import function
from moepack.storage.regular_file import open_regular

ENDS_WITH_INPUT = "MOEPACK_ENDS_WITH_INPUT"
"""If this variable is set, the server ends when its standard input does."""

_BYTES_PER_TOKEN = 32
"""Several times what JSON takes for a token. Before it sees that a text is too long, llama.cpp
tokenizes all of it, in some sixty times its memory."""
_LEAST_BODY_LENGTH = 1 << 20
_MEDIA_LENGTH = 64 << 20
"""Of pictures and sounds, which are no text."""
_TRAINED_CONTEXT = 1 << 18
"""Tokens of a context by the model, whose own is not known here."""
_SECONDS_BETWEEN = 1.0
"""Between figures for `moepack ps`."""
_SECONDS_OF_END = 1.0
"""In which signals count as one: parents, terminals and units of systemd send several."""
_SECONDS_TO_SAVE = 3.0
"""After these."""
_SPARE_DESCRIPTORS = 8
"""For what llama.cpp opens besides connections."""
_ARENA_MAX = -8
"""M_ARENA_MAX of glibc's malloc.h."""
_EXIT_CODES = {RequestError: 2, SourceError: 3, MachineError: 6}


def main() -> int:
    """Serve until a signal ends it; return the exit code."""
    log = _log()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # as many connections as this user may have
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        if ("--api-key", "") in pairwise(sys.argv):
            # llama.cpp would ask for none, as an empty variable must not have it.
            raise RequestError("an empty API key", place="--api-key")
        if sys.argv[1:2] == [PROGRAM]:
            _serve_installed(find_executable(sys.argv[2]), sys.argv[3:])
        params = parse_options(sys.argv[1:], log.note)
        if (path := _model_path(params)) == "":
            raise RequestError("no model is given", hint="name its file: -m MODEL")
        if path is not None:
            try:
                os.close(open_regular(path))
            except OSError as error:
                problem = f"cannot read the model: {error.strerror}"
                raise SourceError(problem, path=path) from None
        _serve(params, log)
    except MoepackError as error:
        sys.stderr.write(f"error: {error}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        return _EXIT_CODES.get(type(error), 1)
    return 0


def _serve(params: Any, log: ServerLog) -> None:
    import xllamacpp

    # Until the model is loaded there is nothing to clean up, and xllamacpp lets no Python run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = read_gate_options(sys.argv[1:])
    _share_one_arena()
    params.ssl_file_key = params.ssl_file_cert = ""
    params.cors_origins = THIS_MACHINE  # the gate decides, and hides origins
    tls, listeners = _tls(options), _listeners(options)
    # An abstract socket: no file is left behind, and no browser can reach it.
    inner = f"\0moepack-server-{os.getpid()}.sock"
    params.hostnames = [inner]
    files = open_prompt_files(params, sys.argv[1:])
    if files is not None:
        params.slot_save_path = f"{files.folder}{os.sep}"
    try:
        server = xllamacpp.Server(params)
    except RuntimeError:
        # llama.cpp says why in its log alone.
        problem = "llama.cpp does not load the model; the lines above say why"
        raise SourceError(problem, path=_model_path(params)) from None

    async def connect() -> Connection:
        return await asyncio.open_unix_connection(inner)

    # The preloaded library has both; without that library nobody has to know.
    program = ctypes.CDLL(None)
    counted = getattr(program, "moepack_set_request_count", lambda count: None)
    routed_count = getattr(program, "moepack_routed_count", lambda: None)
    watch = Watch(log.request, _cache_reader(), Watched.here().model)
    states = None
    if files is not None:
        ask = make_asker(connect, params.api_prefix, params.api_keys[:1])
        states = PromptStates(files, ask, log.note)
    gate = _gate(connect, options, log, watch, counted, routed_count, states)
    asyncio.run(_answer(gate, listeners, tls, _announcement(options, log), watch, states=states))
    del server


def _share_one_arena() -> None:
    """Give all threads of this process one arena of the allocator, where the C library is glibc.

    By default each thread that answers has an arena of its own, and each arena keeps much of what
    its largest request took.
    """
    mallopt = function("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def _serve_installed(program: Path, words: Sequence[str]) -> NoReturn:
    """Serve by the llama-server at `program`; end as it ends."""
    options = read_gate_options(words)
    tls, listeners = _tls(options), _listeners(options)
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the program prints is a log
    server = InstalledServer(program, words)
    log = _log()
    watch = Watch(log.request, _cache_reader(), Watched.here().model)
    gate = _gate(server.connect, options, log, watch)
    asyncio.run(_answer(gate, listeners, tls, _announcement(options, log), watch, server))
    raise AssertionError


def _log() -> ServerLog:
    return ServerLog(Watched.here().log, sys.stdout, sys.stderr)


def _announcement(options: GateOptions, log: ServerLog) -> Callable[[Sequence[str]], None]:
    return partial(log.listening, prefix=options.prefix, has_page=options.has_page)


def _gate(
    connect: Callable[[], Awaitable[Connection]],
    options: GateOptions,
    log: ServerLog,
    watch: Watch,
    counted: Callable[[int], object] = lambda count: None,
    routed_count: Callable[[], int | None] = lambda: None,
    states: PromptStates | None = None,
) -> Gate:
    access = Access(options.origins, options.hosts, options.has_key)
    count = options.slot_count
    most, read = (count, lambda: None) if count > 0 else (USUAL_SLOTS, watch.cache)
    turns = Turns(most, read, log.note)

    @contextlib.asynccontextmanager
    async def turn(path: bytes, body: bytes) -> AsyncIterator[None]:
        async with turns.turn(), states.text(path, body) if states else contextlib.nullcontext():
            yield

    return Gate(
        connect,
        access,
        _limits(options),
        watch,
        counted,
        turn,
        routed_count,
        hides_slots=states is not None,
    )


def _limits(options: GateOptions) -> GateLimits:
    """Return limits by the context, and by the descriptors that this process may still open.

    A connection takes one of them, and a request two more: here, and in llama.cpp.
    """
    body_length = _LEAST_BODY_LENGTH + _BYTES_PER_TOKEN * (options.context or _TRAINED_CONTEXT)
    body_length += _MEDIA_LENGTH if options.has_media else 0
    usual, (most, _) = GateLimits(), resource.getrlimit(resource.RLIMIT_NOFILE)
    free_count = most - len(os.listdir("/proc/self/fd")) - _SPARE_DESCRIPTORS
    return usual._replace(
        body_length=body_length,
        held_length=usual.held_length + body_length,
        connection_count=max(2, min(usual.connection_count, free_count // 2)),
        open_count=max(1, min(usual.open_count, free_count // 4)),
        ping_seconds=options.ping_seconds if options.ping_seconds > 0 else None,
    )


def _cache_reader() -> Callable[[], CacheStatistics | None]:
    """Return a function that reads what the server's cache of experts has counted, None without.

    The preloaded library counts in a file that moepack names.
    """
    path = os.environ.get("MOEPACK_CONTROL")
    # It stays open: a process that closes it loses the lock that tells moepack of its end.
    control = Control(path) if path else None
    return lambda: next(iter(control.statistics()), None) if control else None


def _model_path(params: Any) -> str | None:
    """Return the path that llama.cpp opens, if it is UTF-8: xllamacpp returns no other."""
    try:
        return str(params.model.path)
    except UnicodeDecodeError:
        return None


async def _answer(
    gate: Gate,
    listeners: Sequence[socket.socket],
    tls: ssl.SSLContext | None,
    announce: Callable[[Sequence[str]], None],
    watch: Watch,
    server: InstalledServer | None = None,
    states: PromptStates | None = None,
) -> None:
    """Answer until a signal, the end of the input, or the end of `server`."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if os.environ.get(ENDS_WITH_INPUT):
        loop.add_reader(sys.stdin.fileno(), _read_input, ended)
    if server is not None:
        loop.add_reader(server.descriptor, ended.set)
        loading = asyncio.create_task(server.wait_until_loaded())
        waiting = asyncio.create_task(ended.wait())
        await asyncio.wait((loading, waiting), return_when=asyncio.FIRST_COMPLETED)
        if ended.is_set():
            _end(server)
    for listener in listeners:
        gate.listen(listener, None if listener.family == socket.AF_UNIX else tls)
    urls = [_url(listener, tls is not None) for listener in listeners]
    announce(urls)
    await _publish(watch, urls[0], ended)
    # Answers that are being computed are not waited for: llama.cpp looks for the end of a request
    # only between tokens, and its destructors wait for it. It has nothing that needs to be closed.
    for listener in listeners:
        if listener.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                os.unlink(listener.getsockname())
    if states is not None:
        await _save(states, ended)
    _end(server)


def _read_input(ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1 << 12):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        ended.set()


async def _save(states: PromptStates, ended: asyncio.Event) -> None:
    """Save the states of texts after a signal, until another."""
    saving = asyncio.create_task(states.save())
    await asyncio.wait([saving], timeout=_SECONDS_OF_END)
    ended.clear()  # another signal ends it at once
    waiting, first = asyncio.create_task(ended.wait()), asyncio.FIRST_COMPLETED
    await asyncio.wait([saving, waiting], timeout=_SECONDS_TO_SAVE, return_when=first)
    saving.cancel()
    await asyncio.gather(saving, return_exceptions=True)


def _end(server: InstalledServer | None) -> NoReturn:
    code, problem = (0, None) if server is None else server.close()
    if problem is not None:
        sys.stderr.write(f"error: {problem}\n")
        sys.stderr.flush()
    os._exit(code)


async def _publish(watch: Watch, url: str, ended: asyncio.Event) -> None:
    """Write the figures of a server for `moepack ps` until it has ended, if it is to be listed."""
    if watch.model is None:
        await ended.wait()
        return
    with ServerFile() as file:
        while not ended.is_set():
            file.write({"url": url, **watch.figures()})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _SECONDS_BETWEEN)


def _bound(host: str, port: int, shares_port: bool) -> socket.socket:
    """Return a bound socket, before the model is loaded: an occupied port is known at once."""
    is_path = host.endswith(".sock")
    try:
        kind = socket.SOCK_STREAM
        family = socket.AF_UNIX if is_path else socket.getaddrinfo(host, None, type=kind)[0][0]
        # With its protocol named, asyncio sends each piece of a stream at once.
        listener = socket.socket(family, kind, 0 if is_path else socket.IPPROTO_TCP)
        if not is_path:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(host if is_path else (host, port))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        place = host if is_path else f"{host} port {port}"
        hint = "choose another with --host and --port"
        raise MachineError(f"cannot listen at {place}: {reason}", hint=hint) from None
    return listener


def _url(listener: socket.socket, has_tls: bool) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    return f"{'https' if has_tls else 'http'}://{shown}:{port}"


def _listeners(options: GateOptions) -> list[socket.socket]:
    return [_bound(host, options.port, options.shares_port) for host in options.hosts]


def _tls(options: GateOptions) -> ssl.SSLContext | None:
    """Return the context for TLS, which ends at the gate."""
    key, certificate = options.tls_key, options.tls_certificate
    if not key and not certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as error:
        problem = f"cannot read the certificate or its key: {error.strerror}"
        raise RequestError(problem, path=certificate) from None
    return context


if __name__ == "__main__":
    sys.exit(main())
