"""The command `run`: a model that may be larger than memory, in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from moepack.cli.live_line import live_line
from moepack.cli.model_options import engine_options, sampling_options
from moepack.cli.parameters import InputFile
from moepack.cli.terminal import (
    complain,
    is_quiet,
    json_option,
    quiet_option,
    show,
    source_or_pack_argument,
    verbose_option,
)
from moepack.errors import MachineError, RequestError

if TYPE_CHECKING:
    from moepack.llama_cpp.sampling import Sampling
    from moepack.running.chat import Message
    from moepack.running.generation import Generation
    from moepack.running.model import Model


@click.command()
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
    **engine: Any,
) -> None:
    """Run a model under llama.cpp, also one that is larger than memory.

    Of a pack, or of a GGUF as it lies; experts are read when the model chooses them. Without a
    prompt it is a chat: Ctrl-C ends an answer, and at the prompt the chat.

    Example: moepack run model.gguf -p "Why is the sky blue?" --memory 8GiB
    """
    from moepack.report import run_text
    from moepack.running.model import Model

    text = _prompt(prompt, prompt_path)
    if text is None and (as_json or raw):
        option = "--json" if as_json else "--raw"
        raise RequestError(f"{option} needs a prompt", hint="give it with -p or -f")
    with Model(source_or_pack, **engine) as model:
        if not is_quiet() and not as_json:
            click.echo(run_text.memory(model.memory), err=True)
        conversation = _Conversation(model, system, sampling=sampling, count=tokens)
        if text is None:
            _chat(conversation, stats)
            return
        has_template = model.has_chat_template or system is not None
        generation = (
            conversation.ask(text) if has_template and not raw else conversation.go_on(text)
        )
        if as_json:
            for _ in generation:
                pass
            show(generation.facts, as_json, run_text.generated)
        else:
            _print(generation, stats)


def _prompt(text: str | None, path: str | None) -> str | None:
    if text is not None and path is not None:
        raise click.UsageError("-p and -f at once")
    if path is None:
        return text
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        raise RequestError(f"cannot read the prompt: {error.strerror}", path=path) from None


class _Conversation:
    """What was said to a model, and what it answered."""

    def __init__(self, model: Model, system: str | None, **options: Any) -> None:
        self._model = model
        self._options = options
        self._messages: list[Message] = []
        if system is not None:
            self._say("system", system)

    def go_on(self, text: str) -> Generation:
        """Go on with a text as it is."""
        return self._model.generate(text, **self._options)

    def ask(self, text: str) -> Generation:
        """Say something, and have it answered."""
        self._say("user", text)
        return self._model.chat(self._messages, **self._options)

    def take(self, answer: str) -> None:
        """Keep what was answered, or as much of it as there is."""
        self._say("assistant", answer)

    def _say(self, role: str, text: str) -> None:
        from moepack.running.chat import Message

        self._messages.append(Message(role, text))


def _chat(conversation: _Conversation, has_stats: bool) -> None:
    """Answer line by line, until there are no more or somebody interrupts at the prompt."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                click.echo()
            return
        if not line.strip():
            continue
        generation = conversation.ask(line)
        try:
            _print(generation, has_stats)
        except KeyboardInterrupt:
            click.echo()
        except MachineError as error:  # the next one may find the drive well again
            click.echo()
            complain("error", str(error))
        conversation.take(generation.text)


def _print(generation: Generation, has_stats: bool) -> None:
    """Print a text as it comes, and what it took."""
    from moepack.report import run_text

    with live_line(is_wanted=has_stats) as draw:
        for piece in generation:
            click.echo(piece, nl=False)
            sys.stdout.flush()
            draw(lambda: run_text.so_far(generation.so_far))
        click.echo()
    if not is_quiet():
        click.echo(run_text.generated(generation.facts), err=True)
