"""The command `serve`: a model behind llama.cpp's own server, for the clients that people have."""

from __future__ import annotations

import ipaddress
import os
import sys
from typing import Any

import click

from moepack.cli.model_options import pager_options, threads_option
from moepack.cli.program import CommandWithRest, run_command
from moepack.cli.run_words import refuse_program
from moepack.cli.terminal import complain, quiet_option, source_or_pack_argument
from moepack.errors import RequestError
from moepack.escaping import one_line
from moepack.llama_cpp.bounds import MAX_CONTEXT


@click.command(cls=CommandWithRest, rest="OPTIONS OF llama-server", expand=refuse_program)
@source_or_pack_argument
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 is everywhere."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="TCP port; 0 is any.",
)
@click.option(
    "--api-key",
    envvar="MOEPACK_API_KEY",
    metavar="KEY",
    help="Answer only clients that send it; better in MOEPACK_API_KEY, which others do not see.",
)
@click.option(
    "--name", metavar="NAME", help="Name of the model for clients; by default its file's name."
)
@click.option(
    "-c",
    "--context",
    type=click.IntRange(1, MAX_CONTEXT),
    default=4096,
    show_default=True,
    help="Tokens of context, for all texts together.",
)
@threads_option
@pager_options
@click.option("--stats", is_flag=True, help="Print now and then what is read and what hits.")
@quiet_option
@click.pass_context
def serve(
    context: click.Context,
    /,
    source_or_pack: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    name: str | None,
    threads: int | None,
    rest: tuple[str, ...] | None,
    **options: Any,
) -> None:
    """Serve a model with llama.cpp's own server, also one that is larger than memory.

    Clients of OpenAI's and Anthropic's APIs are answered, several at once, with tools, grammars and
    JSON schemas; its page is at the address itself. Behind `--` come any options of llama-server.
    Ctrl-C ends it.

    Example: moepack serve model.moepack --memory 8GiB --port 8080 -- -np 2
    """
    if api_key == "":
        raise RequestError("an empty API key", place="--api-key")
    if api_key is not None:
        # Not as an option of the program: other users of the machine would see it.
        os.environ["LLAMA_API_KEY"] = api_key
    elif not _is_loopback(host):
        complain("note", "without --api-key it answers everybody who reaches this machine")
    called = name or os.path.basename(os.path.normpath(source_or_pack[0]))
    command = [sys.executable, "-m", "moepack.programs.server", "-m", "{}"]
    command += ["--host", host, "--port", str(port), "--alias", one_line(called)]
    command += ["-c", str(options.pop("context"))]
    if threads is not None:
        command += ["-t", str(threads)]
    run_command(context, source_or_pack, [*command, *(rest or ())], is_ours=True, **options)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
