"""The command `run`: a model that may be larger than memory, in the terminal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from moepack.cli.chat import Conversation, chat, print_text
from moepack.cli.model_options import engine_options, sampling_options
from moepack.cli.parameters import InputFile
from moepack.cli.program import CommandWithRest, check_options, run_command
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
    from moepack.llama_cpp.sampling import Sampling


MAX_PROMPT = 1 << 24
"""Characters of a prompt from a file: no context that there is has room for more."""


@click.command(cls=CommandWithRest, rest="PROGRAM ARGUMENTS")
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

    Examples:
    moepack run model.gguf -p "Why is the sky blue?" --memory 8GiB

    moepack run model.gguf --memory 24GiB -- llama-server -m {} -ngl 99 --cpu-moe
    """
    if rest is not None:
        context = click.get_current_context()
        check_options(context)
        run_command(context, source_or_pack, rest, stats=stats, **engine)
        return
    from moepack.report import run_text
    from moepack.running.model import Model

    text = _prompt(prompt, prompt_path)
    if text is None and (as_json or raw):
        option = "--json" if as_json else "--raw"
        raise RequestError(f"{option} needs a prompt", hint="give it with -p or -f")
    if raw and system is not None:
        raise RequestError("--raw goes without a template, and --system needs one")
    with Model(source_or_pack, **engine) as model:
        if not is_quiet() and not as_json:
            say(run_text.memory(model.memory), err=True)
        options: Any = {"sampling": sampling, "count": tokens}
        conversation = Conversation(model, system, **options)
        if text is None:
            model.check_chats()
            chat(conversation, stats)
            return
        is_plain = raw or not (model.has_chat_template or system is not None)
        with (
            nullcontext(model.generate(text, **options)) if is_plain else conversation.ask(text)
        ) as generation:
            if as_json:
                for _ in generation:
                    pass
                show(generation.facts, as_json, run_text.generated)
            else:
                print_text(generation, stats)


def _prompt(text: str | None, path: str | None) -> str | None:
    if text is not None and path is not None:
        raise click.UsageError("-p and -f at once")
    if path is None:
        return text
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            prompt = file.read(MAX_PROMPT + 1)
    except OSError as error:
        raise RequestError(f"cannot read the prompt: {error.strerror}", path=path) from None
    if len(prompt) > MAX_PROMPT:
        expected = f"up to {MAX_PROMPT:,} characters"
        raise RequestError("the prompt is too long", path=path, expected=expected)
    return prompt
