"""The commands `run` and `serve`: a chat, an answer, a program of llama.cpp, or its server."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from moepack.cli.running.answers import print_answer
from moepack.cli.running.chat import chat, make_editor
from moepack.cli.running.models import (
    fetch,
    find_server,
    note,
    require_engine,
    run_program_command,
    start_server,
    trace_to,
)
from moepack.cli.running.options import (
    chat_options,
    context_option,
    engine_options,
    sampling_options,
    server_option,
    stats_option,
    streaming_options,
    threads_option,
)
from moepack.cli.shared.argument_names import typed_name
from moepack.cli.shared.files import read_piped_text, read_prompt
from moepack.cli.shared.options import (
    file_option,
    flag_option,
    number_option,
    progress_options,
    quiet_option,
    size_option,
    source_or_pack_argument,
    verbose_option,
)
from moepack.cli.shared.parameters import STANDARD_INPUT, STANDARD_STREAM
from moepack.cli.shared.terminal import complain, is_json, is_verbose, remember
from moepack.cli.words.llama_command import LlamaCommand, check_rest, is_prompt
from moepack.common.errors import RequestError
from moepack.common.escaping import one_line, shell_word
from moepack.common.pack_files import is_pack
from moepack.common.paths import is_remote
from moepack.running.serving.sampling import MAX_CONTEXT

if TYPE_CHECKING:
    from moepack.pack.reading.pack import Pack
    from moepack.running.serving.sampling import Sampling

_PROGRAM_OPTIONS = {
    *("source_or_pack", "memory", "policy", "pin", "backend", "check", "trace_path", "no_learn"),
    *("prefetch", "stats", "quiet", "verbose", "help"),
}
"""The parameters that go with any program: it has all others itself."""


@click.command(cls=LlamaCommand, rest_metavar="PROGRAM ARGUMENTS")
@source_or_pack_argument
@click.option(
    "-p",
    "--prompt",
    metavar="TEXT",
    help="Prompt to answer, with text on standard input behind it; - is that text alone. Without "
    "one, a chat begins.",
)
@file_option("-f", "--file", "prompt_path", help="File with the prompt.")
@flag_option("--raw", help="Continue texts as they are, without a chat template.")
@click.option("-sys", "--system", "--system-prompt", metavar="TEXT", help="System prompt.")
@number_option(
    "-n",
    "--tokens",
    "--predict",
    "--n-predict",
    least=-2,
    default=-1,
    help="Maximum number of tokens per answer; -1 is limited by the context alone.",
)
@engine_options
@chat_options
@sampling_options
@stats_option
@progress_options
def run(
    source_or_pack: tuple[str, ...],
    prompt: str | None,
    prompt_path: str | None,
    raw: bool,
    system: str | None,
    tokens: int,
    sampling: Sampling,
    stats: bool,
    chat_template: str | None,
    chat_template_file: str | None,
    rest: tuple[str, ...] | None,
    passed_on: Sequence[str],
    **engine: Any,
) -> None:
    """Run a model under llama.cpp, even one bigger than memory.

    The model is a pack or a GGUF; experts are read when its routers select them. Without a prompt
    it is a chat: /help lists its commands, Ctrl-C ends an answer, Ctrl-D the chat.

    With `-- PROGRAM` it runs any unmodified program that uses llama.cpp: {} in its arguments is
    replaced by the model's path, which is also in the variable MOEPACK_MODEL. Options behind `--`
    are for llama.cpp's server that answers here.

    Example: moepack run model.gguf -p "Why is the sky blue?" --memory 8GiB

    Example: moepack run model.gguf --memory 8GiB -- llama-server -m {} -ngl 99
    """
    if rest is not None and not "".join(rest[:1]).startswith("-"):
        _run_program(source_or_pack, rest, passed_on, stats=stats, **engine)
        return
    from moepack.host.processors import OtherWork
    from moepack.pack.opening.open_model import open_model
    from moepack.running.serving.chat import Conversation
    from moepack.running.serving.server_options import chat_template_options

    other_work = OtherWork()
    source_or_pack, text, is_piped = _split_prompt(source_or_pack, prompt, prompt_path)
    check_rest(source_or_pack, rest or (), is_one_text=True)
    require_engine(source_or_pack, engine["server_program"])
    template = chat_template_options(chat_template, chat_template_file)
    _check(text, raw, system, template, tokens)
    editor = make_editor() if text is None else None
    with ExitStack() as stack:
        pack = stack.enter_context(open_model(fetch(source_or_pack)))
        pack.require_files()
        is_raw = raw or _lacks_template(pack, system, template)
        trace = stack.enter_context(trace_to(engine.pop("trace_path"), pack, has_requests=True))
        words = [*template, *passed_on, *(rest or ())]
        server = stack.enter_context(start_server(pack, trace, words, other_work, **engine))
        conversation = Conversation(
            server.client,
            system,
            is_raw=is_raw,
            sampling=sampling,
            count=tokens if tokens > 0 else None,
        )
        if text is None:
            chat(conversation, server, editor, has_stats=stats)
            return
        if not is_piped:
            text = "\n\n".join(part for part in (text, read_piped_text()) if part)
        print_answer(server, partial(conversation.ask, text), has_stats=stats)


def _split_prompt(
    words: tuple[str, ...], prompt: str | None, path: str | None
) -> tuple[tuple[str, ...], str | None, bool]:
    """Return the words for the model, the prompt, and whether it is all of standard input.

    The prompt is that of an option, or the last of the words.
    """
    if prompt == STANDARD_STREAM and path is None:
        prompt, path = None, STANDARD_INPUT
    if prompt is not None and path is not None:
        raise click.UsageError("-p and -f at once")
    if path is not None:
        return words, read_prompt(path), path == STANDARD_INPUT
    if prompt is None and is_prompt(words[-1]) and len(words) > 1:  # as ollama takes it
        return words[:-1], words[-1], False
    return words, prompt, False


def _lacks_template(pack: Pack, system: str | None, template: Sequence[str]) -> bool:
    """Return whether texts are continued as they are, since the model has no template for chats.

    Raises RequestError for a system prompt, which needs one.
    """
    from moepack.running.serving.server_options import has_chat_template

    if template or has_chat_template(pack):
        return False
    if system is not None:
        run = f"moepack run {shell_word(str(pack.path))}"
        hint = f"give it one: `{run} --chat-template chatml`"
        raise RequestError("the model has no template for chats", path=pack.path, hint=hint)
    note(
        "the model has no template for chats: each text is continued as it is, and by itself "
        "(--raw); --chat-template chatml gives it one"
    )
    return True


def _check(
    text: str | None, raw: bool, system: str | None, template: Sequence[str], tokens: int
) -> None:
    if text is None and is_json():
        raise RequestError("--json needs a prompt", hint="give it with -p or -f")
    if raw and (system is not None or template):
        option = "--system" if system is not None else "--chat-template"
        raise RequestError(f"--raw uses no template, but {option} needs one")
    if not tokens:
        raise RequestError("no tokens requested", place="--tokens", expected="1 or more, or -1")
    if text == "":
        raise RequestError("the prompt is empty", hint="for a chat, leave -p out")


def _run_program(
    source_or_pack: tuple[str, ...],
    command: Sequence[str],
    passed_on: Sequence[str],
    **options: Any,
) -> None:
    """Run a program of one's own. Raises RequestError for options that it takes itself."""
    context = click.get_current_context()
    typed = [
        typed_name(parameter)
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        and parameter.name not in _PROGRAM_OPTIONS
    ]
    for option in (*typed, *passed_on[:1]):
        problem = f"{option} is not for a program of one's own"
        raise RequestError(problem, hint="give the program's own options after its name")
    run_program_command(source_or_pack, command, **options)


@click.command(cls=LlamaCommand, rest_metavar="OPTIONS OF llama-server")
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
@number_option(
    "--wanted-context",
    least=0,
    most=MAX_CONTEXT,
    default=0,
    help="Context for which half of the memory may be taken, if -c sets none: agents need 65536.",
)
@threads_option
@server_option
@chat_options
@streaming_options
@size_option(
    "--prompt-cache",
    envvar="MOEPACK_PROMPT_CACHE",
    help="Space on disk for conversations, which go on after a restart; 0 keeps none.  [default: "
    "8GiB, or a tenth of the free space]",
)
@click.option(
    "--no-prompt-cache",
    is_flag=True,
    help="Keep no conversations on disk, and use none of those kept.",
)
@stats_option
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    callback=remember("log"),
    help="Format of the log on standard error: lines for people, or a JSON object for each event.",
)
@quiet_option
@verbose_option
def serve(
    source_or_pack: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    cors_origins: str | None,
    name: str | None,
    threads: int | None,
    server_program: str | None,
    chat_template: str | None,
    chat_template_file: str | None,
    no_prompt_cache: bool,
    rest: tuple[str, ...] | None,
    passed_on: Sequence[str],
    **options: Any,
) -> None:
    """Serve a model with llama.cpp's own server, even one bigger than memory.

    It answers clients of OpenAI's and Anthropic's APIs, with tools, grammars and JSON schemas, and
    has a web page at its address. Texts are computed together or in turn, whichever is faster.
    Options of llama-server go after `--`. Ctrl-C ends it.

    Example: moepack serve model.moepack --memory 8GiB --port 8080 -- -np 2
    """
    from moepack.running.serving.model_server import server_command
    from moepack.running.serving.server_options import chat_template_options

    if api_key == "":
        raise RequestError("an empty API key", place="--api-key")
    check_rest(source_or_pack, rest or ())
    template = chat_template_options(chat_template, chat_template_file)
    if api_key is not None:
        # Not as an option of the program: other users of the machine would see it.
        os.environ["LLAMA_API_KEY"] = api_key
    elif not _is_loopback(host):
        complain("note", "without --api-key it answers everybody who can reach this machine")
    alias = one_line(name) if name else served_name(source_or_pack)
    require_engine(source_or_pack, server_program)
    command = [*server_command(find_server(server_program)), "-m", "{}"]
    command += ["--host", host, "--port", str(port), "--alias", alias]
    command += _log_words(options["log_format"], is_installed=server_program is not None)
    command += [] if cors_origins is None else ["--cors-origins", cors_origins]
    command += [*template, *passed_on, *(rest or ())]
    _note_projector(source_or_pack, command)
    if no_prompt_cache:
        options["prompt_cache"] = 0
    sizes = partial(_model_words, command, options.pop("context"), threads)
    run_program_command(source_or_pack, command, served_name=alias, model_words=sizes, **options)


def _log_words(log_format: str, is_installed: bool) -> list[str]:
    """Return options for llama.cpp's own log: of errors alone, since warnings quote requests.

    A server that is installed may know no log in JSON.
    """
    words = ["--log-jsonl"] if log_format == "json" and not is_installed else []
    if "LLAMA_ARG_LOG_VERBOSITY" not in os.environ:
        words += ["-lv", "3" if is_verbose() else "1"]
    return words


def _note_projector(model: Sequence[str], command: Sequence[str]) -> None:
    """Print how images are accepted if a projector lies beside a model, and none is in use.

    It is not used unasked: with one no texts are kept on disk, and its memory is not counted.
    """
    from moepack.running.serving.installed_server import read_gate_options

    path = Path(model[0])
    folder = path if path.is_dir() and not is_pack(path) else path.absolute().parent
    if is_remote(model[0]) or not folder.is_dir() or read_gate_options(command).has_media:
        return
    projectors = sorted(folder.glob("*[mM][mM][pP][rR][oO][jJ]*.gguf"))
    if projectors:
        option = f"`-- --mmproj {shell_word(str(projectors[0]))}`"
        note(f"images are refused; with {option} they are read")


def served_name(source_or_pack: Sequence[str]) -> str:
    """Return what clients call a model by default: the name of its file."""
    return one_line(os.path.basename(os.path.normpath(source_or_pack[0])))


def _model_words(
    command: Sequence[str], length: int | None, threads: int | None, pack: Pack
) -> list[str]:
    """Return options for the context, threads and template that the command does not set."""
    from moepack.host.processors import limited_threads
    from moepack.running.programs.command import TEMPLATES, THREADS
    from moepack.running.serving.server_options import checked_context, has_chat_template

    words: list[str] = []
    if length is not None:
        words += ["-c", str(checked_context(pack, length, note))]
    if threads is not None or not THREADS.is_set(command):
        threads = limited_threads() if threads is None else threads
        words += [] if threads is None else ["-t", str(threads)]
    has_template = any(option.is_set(command) for option in TEMPLATES)
    if not has_template and not has_chat_template(pack):
        note("the model has no template for chats: they get that of --chat-template chatml")
        words += ["--chat-template", "chatml"]
    return words


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
