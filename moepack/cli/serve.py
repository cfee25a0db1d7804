"""The command `serve`: llama.cpp's own server, for the clients that people have."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from moepack.cli.running.options import (
    chat_options,
    context_option,
    pager_options,
    stats_option,
    threads_option,
)
from moepack.cli.running.program import run_program_command
from moepack.cli.running.starting import note, require_engine
from moepack.cli.shared.options import number_option, quiet_option, source_or_pack_argument
from moepack.cli.shared.terminal import complain
from moepack.cli.words.llama_command import SERVE, LlamaCommand, check_rest
from moepack.common.errors import RequestError
from moepack.common.escaping import one_line

if TYPE_CHECKING:
    from moepack.pack.reading.pack import Pack


@click.command(cls=LlamaCommand, spellings=SERVE, rest_metavar="OPTIONS OF llama-server")
@source_or_pack_argument
@click.option(
    "--host",
    default="127.0.0.1",
    help="Address to listen at; 0.0.0.0 is reachable from everywhere.",
)
@number_option("--port", least=0, most=65535, default=8080, help="TCP port; 0 is any free one.")
@click.option(
    "--api-key",
    envvar="MOEPACK_API_KEY",
    metavar="KEY",
    help="Require this bearer token; other users see it unless it is in MOEPACK_API_KEY.",
)
@click.option(
    "--cors-origins",
    metavar="ORIGINS",
    help="Web pages that may use the server, and names for it: localhost,https://chat.example, or "
    "* for all.  [default: localhost, this machine's pages]",
)
@click.option("--name", metavar="NAME", help="Model name for clients; by default the file's name.")
@context_option
@threads_option
@chat_options
@pager_options
@stats_option
@quiet_option
def serve(
    source_or_pack: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    cors_origins: str | None,
    name: str | None,
    threads: int | None,
    chat_template: str | None,
    chat_template_file: str | None,
    rest: tuple[str, ...] | None,
    passed_on: Sequence[str],
    **options: Any,
) -> None:
    """Serve a model with llama.cpp's own server, even one bigger than memory.

    It answers clients of OpenAI's and Anthropic's APIs, several at once, with tools, grammars and
    JSON schemas, and has a web page at its address. Options of llama-server go after `--`.
    Ctrl-C ends it.

    Example: moepack serve model.moepack --memory 8GiB --port 8080 -- -np 2
    """
    from moepack.running.programs.server_options import chat_template_options

    if api_key == "":
        raise RequestError("an empty API key", place="--api-key")
    ours = {"--context": options["context"], "--threads": threads}
    check_rest(source_or_pack, rest or (), ours)
    template = chat_template_options(chat_template, chat_template_file)
    if api_key is not None:
        # Not as an option of the program: other users of the machine would see it.
        os.environ["LLAMA_API_KEY"] = api_key
    elif not _is_loopback(host):
        complain("note", "without --api-key it answers everybody who can reach this machine")
    alias = name or os.path.basename(os.path.normpath(source_or_pack[0]))
    command = [sys.executable, "-m", "moepack.running.programs.server", "-m", "{}"]
    command += ["--host", host, "--port", str(port), "--alias", one_line(alias)]
    require_engine(source_or_pack)
    command += [] if cors_origins is None else ["--cors-origins", cors_origins]
    command += [*template, *passed_on, *(rest or ())]
    sizes = partial(_model_words, command, options.pop("context"), threads)
    run_program_command(source_or_pack, command, is_ours=True, model_words=sizes, **options)


def _model_words(
    command: Sequence[str], length: int | None, threads: int | None, pack: Pack
) -> list[str]:
    """Return options for the context, threads and template that the command does not set."""
    from moepack.host.processors import limited_threads
    from moepack.running.programs.command import CONTEXT, TEMPLATES, THREADS
    from moepack.running.programs.server_options import choose_context, has_chat_template

    words: list[str] = []
    if not CONTEXT.is_set(command, os.environ if length is None else {}):
        words += ["-c", str(choose_context(pack, length, note))]
    if not THREADS.is_set(command, os.environ if threads is None else {}):
        threads = limited_threads() if threads is None else threads
        words += [] if threads is None else ["-t", str(threads)]
    has_template = any(option.is_set(command, os.environ) for option in TEMPLATES)
    if not has_template and not has_chat_template(pack):
        note("the model has no template for chats: they get that of --chat-template chatml")
        words += ["--chat-template", "chatml"]
    return words


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
