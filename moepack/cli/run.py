"""The command `run`: a chat, an answer, or a program of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from moepack.cli.running.answers import print_answer
from moepack.cli.running.chat import chat, make_editor
from moepack.cli.running.options import (
    chat_options,
    engine_options,
    sampling_options,
    stats_option,
)
from moepack.cli.running.program import run_program_command
from moepack.cli.running.starting import (
    fetch,
    note,
    require_engine,
    start_server,
    trace_to,
)
from moepack.cli.shared.argument_names import typed_name
from moepack.cli.shared.files import read_piped_text, read_prompt
from moepack.cli.shared.options import (
    file_option,
    number_option,
    progress_options,
    source_or_pack_argument,
)
from moepack.cli.shared.parameters import STANDARD_INPUT, STANDARD_STREAM
from moepack.cli.shared.terminal import is_json
from moepack.cli.words.llama_command import RUN, LlamaCommand, is_prompt, split_fields
from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word

if TYPE_CHECKING:
    from moepack.pack.reading.pack import Pack
    from moepack.running.programs.sampling import Sampling

_PAGER_OPTIONS = {
    *("source_or_pack", "memory", "policy", "pin", "backend", "check", "trace_path", "no_learn"),
    *("stats", "quiet", "verbose", "help"),
}
"""The parameters that go with any program: it has all others itself."""


@click.command(cls=LlamaCommand, spellings=RUN, rest_metavar="PROGRAM ARGUMENTS")
@source_or_pack_argument
@click.option(
    "-p",
    "--prompt",
    metavar="TEXT",
    help="Prompt to answer, with text on standard input behind it; - is that text alone. Without "
    "one, a chat begins.",
)
@file_option("-f", "--file", "prompt_path", help="File with the prompt.")
@click.option("--raw", is_flag=True, help="Continue texts as they are, without a chat template.")
@click.option("--system", metavar="TEXT", help="System prompt.")
@number_option(
    "-n",
    "--tokens",
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
    replaced by the model's path, which is also in the variable MOEPACK_MODEL.

    Example: moepack run model.gguf -p "Why is the sky blue?" --memory 8GiB

    Example: moepack run model.gguf --memory 8GiB -- llama-server -m {} -ngl 99
    """
    if rest is not None:
        _run_program(source_or_pack, rest, passed_on, stats=stats, **engine)
        return
    from moepack.host.processors import OtherWork
    from moepack.pack.opening.open_model import open_model
    from moepack.running.programs.chat import Conversation
    from moepack.running.programs.server_options import chat_template_options

    other_work = OtherWork()
    if prompt == STANDARD_STREAM and prompt_path is None:
        prompt, prompt_path = None, STANDARD_INPUT
    source_or_pack, text = _split_prompt(source_or_pack, prompt, prompt_path)
    require_engine(source_or_pack)
    template = chat_template_options(chat_template, chat_template_file)
    _check(text, raw, system, template, tokens)
    server_words, fields = split_fields(passed_on)
    editor = make_editor() if text is None else None
    with ExitStack() as stack:
        pack = stack.enter_context(open_model(fetch(source_or_pack)))
        pack.require_files()
        is_raw = raw or _lacks_template(pack, system, template)
        trace = stack.enter_context(trace_to(engine.pop("trace_path"), pack, has_requests=True))
        words = [*template, *server_words]
        server = stack.enter_context(start_server(pack, trace, words, other_work, **engine))
        count = tokens if tokens > 0 else None
        options: Any = {"sampling": sampling, "count": count, "more": fields}
        conversation = Conversation(server.client, system, is_raw=is_raw, **options)
        if text is None:
            chat(conversation, server, editor, has_stats=stats)
            return
        if prompt_path != STANDARD_INPUT:
            text = "\n\n".join(part for part in (text, read_piped_text()) if part)
        print_answer(server, partial(conversation.ask, text), has_stats=stats)


def _split_prompt(
    words: tuple[str, ...], prompt: str | None, path: str | None
) -> tuple[tuple[str, ...], str | None]:
    """Return the words for the model, and the prompt: of an option, or the last of the words."""
    if prompt is not None and path is not None:
        raise click.UsageError("-p and -f at once")
    if path is not None:
        return words, read_prompt(path)
    if prompt is None and is_prompt(words[-1]) and len(words) > 1:  # as ollama takes it
        return words[:-1], words[-1]
    return words, prompt


def _lacks_template(pack: Pack, system: str | None, template: Sequence[str]) -> bool:
    """Return whether texts are continued as they are, since the model has no template for chats.

    Raises RequestError for a system prompt, which needs one.
    """
    from moepack.running.programs.server_options import has_chat_template

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
        and parameter.name not in _PAGER_OPTIONS
    ]
    for option in (*typed, *passed_on[:1]):
        problem = f"{option} is not for a program of one's own"
        raise RequestError(problem, hint="give the program's own options after its name")
    run_program_command(source_or_pack, command, **options)
