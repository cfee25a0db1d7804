"""The command `serve`: a model behind HTTP, for the clients that people have."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Any

import click

from moepack import extras
from moepack.cli.model_options import engine_options
from moepack.cli.terminal import complain, is_quiet, quiet_option, say, source_or_pack_argument
from moepack.errors import MachineError, RequestError
from moepack.escaping import one_line

if TYPE_CHECKING:
    from moepack.serving.server import Server

_GRACE = 5
"""Seconds for texts that are being sent when the server is ended."""
_CONNECTIONS = 512


@click.command()
@source_or_pack_argument
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 is everywhere."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option(
    "--api-key",
    envvar="MOEPACK_API_KEY",
    metavar="KEY",
    help="Answer those alone who bear it; better in MOEPACK_API_KEY, which others do not see.",
)
@click.option("--name", metavar="NAME", help="What clients call the model; its file's name.")
@click.option(
    "--queue", type=click.IntRange(0, 4096), default=64, show_default=True, help="May wait at most."
)
@engine_options
@quiet_option
def serve(
    source_or_pack: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    name: str | None,
    queue: int,
    **engine: Any,
) -> None:
    """Serve a model, also one that is larger than memory, as OpenAI's API does.

    One text is made at a time; other clients wait. Ctrl-C ends it.

    Example: moepack serve model.moepack --memory 8GiB --port 8080
    """
    _check_installed()
    from moepack.report import run_text
    from moepack.running.model import Model
    from moepack.serving.server import Limits, Server

    if api_key == "":
        raise RequestError("an empty API key", place="--api-key")
    with (
        _listening(host, port) as listener,
        Model(source_or_pack, **engine) as model,
    ):
        called = one_line(name or os.path.basename(os.path.normpath(source_or_pack[0])))
        server = Server(model, called, api_key=api_key, limits=Limits(waiting=queue))
        address, bound = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        if not is_quiet():
            if api_key is None and not ipaddress.ip_address(address).is_loopback:
                complain("note", "without --api-key it answers everybody who reaches this machine")
            say(run_text.memory(model.memory), err=True)
            place = f"http://{shown}:{bound}/v1"
            say(f"serving {called} at {place}; Ctrl-C ends it", err=True)
        _run(server, listener)


def _check_installed() -> None:
    for name in ("starlette", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            problem = f"{name} is not installed, which serving needs"
            raise MachineError(problem, hint=extras.hint("serve"))


def _listening(host: str, port: int) -> socket.socket:
    """Listen before the model is loaded: a port that is taken is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        # Python adds the address to the system's words, which is said already.
        reason = str(getattr(error, "strerror", None) or error).partition(" (while ")[0]
        problem = f"cannot listen at {host} port {port}: {reason}"
        raise MachineError(problem, hint="choose another with --host and --port") from None


def _run(server: Server, listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        server.application,
        log_level="warning",
        access_log=False,
        lifespan="off",
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE,
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn hands it on when all is closed
        pass
    finally:
        server.close()
