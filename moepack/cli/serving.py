"""The command `serve`: a model behind llama.cpp's own server, for the clients that people have."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from moepack.cli import llama_spellings
from moepack.cli.llama_command import LlamaCommand
from moepack.cli.model_options import chat_options, pager_options, threads_option
from moepack.cli.program import run_command
from moepack.cli.run_words import refuse_program
from moepack.cli.starting import note_context
from moepack.cli.terminal import complain, is_quiet, quiet_option, source_or_pack_argument
from moepack.errors import RequestError
from moepack.escaping import one_line
from moepack.llama_cpp.bounds import MAX_CONTEXT

if TYPE_CHECKING:
    from moepack.reading.pack import Pack


@click.command(
    cls=LlamaCommand,
    rest="OPTIONS OF llama-server",
    spellings=llama_spellings.SERVE,
    expand=refuse_program,
)
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
    type=click.IntRange(0, MAX_CONTEXT),
    help="Tokens of context, for all texts together; 0: what the model was trained for.  "
    "[default: 4096, or that]",
)
@threads_option
@chat_options
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
    chat_template: str | None,
    chat_template_file: str | None,
    rest: tuple[str, ...] | None,
    passed_on: Sequence[str],
    **options: Any,
) -> None:
    """Serve a model with llama.cpp's own server, also one that is larger than memory.

    Clients of OpenAI's and Anthropic's APIs are answered, several at once, with tools, grammars and
    JSON schemas; its page is at the address itself. Behind `--` come any options of llama-server.
    Ctrl-C ends it.

    Example: moepack serve model.moepack --memory 8GiB --port 8080 -- -np 2
    """
    from moepack.programs.chat_template import chat_template_options

    if api_key == "":
        raise RequestError("an empty API key", place="--api-key")
    ours = {"--context": options["context"], "--threads": threads}
    llama_spellings.check_rest(source_or_pack, rest or (), ours)
    template = chat_template_options(chat_template, chat_template_file)
    if api_key is not None:
        # Not as an option of the program: other users of the machine would see it.
        os.environ["LLAMA_API_KEY"] = api_key
    elif not _is_loopback(host):
        complain("note", "without --api-key it answers everybody who reaches this machine")
    called = name or os.path.basename(os.path.normpath(source_or_pack[0]))
    command = [sys.executable, "-m", "moepack.programs.server", "-m", "{}"]
    command += ["--host", host, "--port", str(port), "--alias", one_line(called)]
    command += [*template, *passed_on, *(rest or ())]
    sizes = partial(_sizes, command, options.pop("context"), threads)
    run_command(context, source_or_pack, command, is_ours=True, model_words=sizes, **options)


def _sizes(
    command: Sequence[str], length: int | None, threads: int | None, pack: Pack
) -> list[str]:
    """Return options for the context and for threads, as far as the command says neither."""
    from moepack.machine.processors import limited_threads
    from moepack.programs.command import says_context, says_threads
    from moepack.programs.context import choose_context

    words: list[str] = []
    if not says_context(command, os.environ if length is None else {}):
        chosen = choose_context(pack, length)
        if not is_quiet():
            note_context(chosen)
        words += ["-c", str(chosen.length)]
    if not says_threads(command, os.environ if threads is None else {}):
        threads = limited_threads() if threads is None else threads
        words += [] if threads is None else ["-t", str(threads)]
    return words


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
