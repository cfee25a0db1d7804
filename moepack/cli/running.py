"""The command `run`: a model that may be larger than memory, in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from moepack.cli import llama_spellings
from moepack.cli.answering import print_answer
from moepack.cli.chat import chat, make_editor
from moepack.cli.llama_command import LlamaCommand, check_passed_on
from moepack.cli.model_options import chat_options, engine_options, sampling_options
from moepack.cli.parameters import InputFile
from moepack.cli.program import check_options, run_command, trace_to
from moepack.cli.prompt_file import read_prompt
from moepack.cli.request_fields import split_fields
from moepack.cli.run_words import prompt_as_option, refuse_program
from moepack.cli.starting import start_server
from moepack.cli.terminal import (
    json_option,
    quiet_option,
    show,
    source_or_pack_argument,
    verbose_option,
)
from moepack.errors import RequestError

if TYPE_CHECKING:
    from moepack.programs.answer import Answer
    from moepack.programs.model_server import ModelServer
    from moepack.programs.sampling import Sampling

    Ask = Callable[[], AbstractContextManager[Answer]]


@click.command(
    cls=LlamaCommand,
    rest="PROGRAM ARGUMENTS",
    spellings=llama_spellings.RUN,
    expand=refuse_program,
    settle=prompt_as_option,
)
@source_or_pack_argument
@click.option("-p", "--prompt", metavar="TEXT", help="Answer this; without it, chat.")
@click.option(
    "-f", "--file", "prompt_path", type=InputFile(), metavar="FILE", help="Answer what is in FILE."
)
@click.option("--raw", is_flag=True, help="Go on with the prompt as it is, without a template.")
@click.option("--system", metavar="TEXT", help="What the model is told before all else.")
@click.option(
    "-n",
    "--tokens",
    type=click.IntRange(-2),
    default=-1,
    help="End each answer after so many tokens; -1 goes on as long as there is context.",
)
@engine_options
@chat_options
@sampling_options
@click.option("--stats", is_flag=True, help="Say all the time how fast it is, and what is read.")
@quiet_option
@verbose_option
@json_option
def run(
    source_or_pack: tuple[str, ...],
    prompt: str | None,
    prompt_path: str | None,
    raw: bool,
    system: str | None,
    tokens: int,
    sampling: Sampling,
    stats: bool,
    as_json: bool,
    chat_template: str | None,
    chat_template_file: str | None,
    rest: tuple[str, ...] | None,
    passed_on: Sequence[str],
    **engine: Any,
) -> None:
    """Run a model under llama.cpp, also one that is larger than memory.

    Of a pack, or of a GGUF as it lies; experts are read when the model chooses them. Without a
    prompt it is a chat: /help lists its commands, Ctrl-C ends an answer, Ctrl-D the chat.

    With `-- PROGRAM` it is any program that uses llama.cpp, as it is: {} among its arguments is the
    model's path, and so is the variable MOEPACK_MODEL.

    Example: moepack run model.gguf -p "Why is the sky blue?" --memory 8GiB

    Example: moepack run model.gguf --memory 8GiB -- llama-server -m {} -ngl 99
    """
    if rest is not None:
        context = click.get_current_context()
        check_options(context)
        check_passed_on(passed_on)
        run_command(context, source_or_pack, rest, stats=stats, **engine)
        return
    from moepack.extras import require
    from moepack.machine.processors import OtherWork
    from moepack.packing.opening import open_model
    from moepack.programs.chat import Conversation
    from moepack.programs.chat_template import chat_template_options, has_chat_template, no_chats

    other_work = OtherWork()
    text = _prompt(prompt, prompt_path)
    require("run")
    template = chat_template_options(chat_template, chat_template_file)
    _check(text, raw, system, template, tokens, as_json)
    server_words, more = split_fields(passed_on)
    editor = make_editor() if text is None else None
    trace_path = engine.pop("trace_path")
    with ExitStack() as stack:
        pack = stack.enter_context(open_model(source_or_pack))
        can_chat = bool(template) or has_chat_template(pack)
        is_plain = raw or (text is not None and system is None and not can_chat)
        if not is_plain and not can_chat:
            raise no_chats(pack)
        trace = stack.enter_context(trace_to(trace_path, pack, has_requests=True))
        words = [*template, *server_words]
        server = stack.enter_context(
            start_server(pack, trace, words, is_silent=as_json, other_work=other_work, **engine)
        )
        options: Any = {"sampling": sampling, "count": tokens if tokens > 0 else None, "more": more}
        conversation = Conversation(server.client, system, **options)
        if text is None:
            chat(conversation, server, editor, has_stats=stats)
        elif is_plain:
            ask = partial(server.client.complete, text, **options)
            _answer(server, ask, has_stats=stats, as_json=as_json)
        else:
            _answer(server, partial(conversation.ask, text), has_stats=stats, as_json=as_json)


def _answer(server: ModelServer, ask: Ask, *, has_stats: bool, as_json: bool) -> None:
    """Print an answer as it comes, or once it is whole as JSON."""
    from moepack.programs.run_facts import measure
    from moepack.report import run_text

    with measure(server, ask) as answer:
        if not as_json:
            print_answer(answer, has_stats=has_stats)
            return
        for _ in answer:
            pass
        show(answer.facts, as_json, run_text.generated)


def _check(
    text: str | None,
    raw: bool,
    system: str | None,
    template: Sequence[str],
    tokens: int,
    as_json: bool,
) -> None:
    if text is None and (as_json or raw):
        option = "--json" if as_json else "--raw"
        raise RequestError(f"{option} needs a prompt", hint="give it with -p or -f")
    if raw and (system is not None or template):
        option = "--system" if system is not None else "--chat-template"
        raise RequestError(f"--raw goes without a template, and {option} needs one")
    if not tokens:
        raise RequestError("no tokens are asked for", place="--tokens", expected="1 or more, or -1")
    if text == "":
        raise RequestError("the prompt is empty", hint="for a chat, leave -p out")


def _prompt(text: str | None, path: str | None) -> str | None:
    if text is not None and path is not None:
        raise click.UsageError("-p and -f at once")
    return text if path is None else read_prompt(path)
