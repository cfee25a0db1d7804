"""The command `run`: a model that may be larger than memory, in the terminal."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Literal

import click

from moepack.cli.chat import chat, print_text
from moepack.cli.model_options import engine_options, sampling_options
from moepack.cli.parameters import InputFile
from moepack.cli.program import (
    CommandWithRest,
    check_options,
    learner_of,
    run_command,
    trace_to,
)
from moepack.cli.prompt_file import read_prompt
from moepack.cli.run_words import prompt_as_option, refuse_program
from moepack.cli.terminal import (
    is_quiet,
    json_option,
    quiet_option,
    say,
    show,
    source_or_pack_argument,
    verbose_option,
)
from moepack.errors import RequestError

if TYPE_CHECKING:
    from moepack.programs.model_server import ModelServer
    from moepack.programs.sampling import Sampling
    from moepack.programs.trace_writer import TraceWriter
    from moepack.reading.pack import Pack


@click.command(
    cls=CommandWithRest, rest="PROGRAM ARGUMENTS", expand=refuse_program, settle=prompt_as_option
)
@source_or_pack_argument
@click.option("-p", "--prompt", metavar="TEXT", help="Answer this; without it, chat.")
@click.option(
    "-f", "--file", "prompt_path", type=InputFile(), metavar="FILE", help="Answer what is in FILE."
)
@click.option("--raw", is_flag=True, help="Go on with the prompt as it is, without a template.")
@click.option("--system", metavar="TEXT", help="What the model is told before all else.")
@click.option(
    "-n", "--tokens", type=click.IntRange(1), help="End each answer after so many tokens."
)
@engine_options
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
    tokens: int | None,
    sampling: Sampling,
    stats: bool,
    as_json: bool,
    rest: tuple[str, ...] | None,
    **engine: Any,
) -> None:
    """Run a model under llama.cpp, also one that is larger than memory.

    Of a pack, or of a GGUF as it lies; experts are read when the model chooses them. Without a
    prompt it is a chat: Ctrl-C ends an answer, and at the prompt the chat.

    With `-- PROGRAM` it is any program that uses llama.cpp, as it is: {} among its arguments is the
    model's path, and so is the variable MOEPACK_MODEL.

    Example: moepack run model.gguf -p "Why is the sky blue?" --memory 8GiB

    Example: moepack run model.gguf --memory 8GiB -- llama-server -m {} -ngl 99
    """
    if rest is not None:
        context = click.get_current_context()
        check_options(context)
        run_command(context, source_or_pack, rest, stats=stats, **engine)
        return
    from moepack.extras import require
    from moepack.packing.opening import open_model
    from moepack.programs.chat import Conversation
    from moepack.programs.chat_template import check_chats, has_chat_template
    from moepack.programs.run_facts import measure
    from moepack.report import program_text, run_text

    text = _prompt(prompt, prompt_path)
    _check(text, raw, system, as_json)
    trace_path = engine.pop("trace_path")
    with (
        open_model(source_or_pack) as pack,
        trace_to(trace_path, pack, has_requests=True) as trace,
    ):
        require("run")
        is_plain = raw or (text is not None and system is None and not has_chat_template(pack))
        if not is_plain:
            check_chats(pack)
        with _start(pack, trace, **engine) as server:
            if not is_quiet() and not as_json:
                pager = server.pager
                line = program_text.beginning(
                    pager.budget, pager.floor, is_warming=pager.is_warming
                )
                say(line, err=True)
            options: Any = {"sampling": sampling, "count": tokens}
            client = server.client
            conversation = Conversation(client, system, **options)
            if text is None:
                chat(conversation, server, stats)
                return

            def ask() -> Any:
                assert text is not None
                return client.complete(text, **options) if is_plain else conversation.ask(text)

            with measure(server, ask) as answer:
                if as_json:
                    for _ in answer:
                        pass
                    show(answer.facts, as_json, run_text.generated)
                else:
                    print_text(answer, stats)


def _check(text: str | None, raw: bool, system: str | None, as_json: bool) -> None:
    if text is None and (as_json or raw):
        option = "--json" if as_json else "--raw"
        raise RequestError(f"{option} needs a prompt", hint="give it with -p or -f")
    if raw and system is not None:
        raise RequestError("--raw goes without a template, and --system needs one")
    if text == "":
        raise RequestError("the prompt is empty", hint="for a chat, leave -p out")


def _start(
    pack: Pack,
    trace: TraceWriter | None,
    *,
    context: int,
    threads: int | None,
    micro_batch: int | None,
    memory: int | Literal["floor"] | None,
    pin: int | None,
    no_learn: bool,
    **options: Any,
) -> ModelServer:
    """Serve a model for this process alone: nobody else has the key."""
    from moepack.pager.pager import PagerOptions
    from moepack.programs.command import single_text_options
    from moepack.programs.micro_batch import choose_micro_batch
    from moepack.programs.model_server import ModelServer

    if micro_batch is None:
        micro_batch = choose_micro_batch(pack, context=context, memory=memory, pinned=pin or 0)
    words = single_text_options(context, threads, micro_batch)
    pager_options = PagerOptions(memory=memory, pinned=pin, micro_batch=micro_batch, **options)
    key = secrets.token_urlsafe()
    writers: Any = {"trace": trace, "learner": learner_of(pack, no_learn)}
    return ModelServer(pack, pager_options, options=words, api_key=key, **writers)


def _prompt(text: str | None, path: str | None) -> str | None:
    if text is not None and path is not None:
        raise click.UsageError("-p and -f at once")
    return text if path is None else read_prompt(path)
