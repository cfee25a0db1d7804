"""The front door: bare `moepack`, its help in groups, and answers to what is no command of it."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import click

from moepack.cli.exit_codes import ExitCode
from moepack.cli.program import CommandWithRest
from moepack.cli.typed_words import HELP_OPTIONS, is_doubtful

GROUPS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Run a model": {
            "run": "Run a model in the terminal: a chat, or an answer to -p.",
            "serve": "Serve a model to clients of OpenAI's and Anthropic's APIs.",
        },
        "Measure and plan": {
            "inspect": "Show what a model or a pack consists of.",
            "doctor": "Report what limits this machine, and a model on it.",
            "machine": "Measure memory and drive, for place and forecast.",
            "place": "Plan what of a model goes into VRAM and memory.",
            "forecast": "Forecast how fast a model will be on a machine.",
            "bench": "Measure the drive, and what a pack is worth on it.",
        },
        "Pack a model": {
            "pack": "Make a pack of a model: one aligned read for one expert.",
            "verify": "Prove a pack, every byte against the model on request.",
            "restore": "Make the GGUF of a pack again, bit for bit.",
            "export gguf": "Write a pack as one GGUF for stock llama.cpp.",
            "mount": "Show the GGUF of a pack as files, with nothing stored.",
            "mirror": "Copy experts to a second drive; then both are read.",
            "index": "Index the experts of a GGUF, with nothing copied.",
            "rank": "Rank the experts of a pack anew, the hottest first.",
            "list": "List the experts of a pack: place, length, hotness.",
            "locate": "Show where the parts of an expert lie.",
            "extract": "Write the bytes of an expert to a file.",
            "include-dir": "Print the folder of moepack.h, for C and C++.",
        },
        "Traces of which experts a model chose": {
            "trace record": "Record a trace: run a model on prompts.",
            "trace import": "Import traces of other programs.",
            "trace stats": "Print how many experts a window of tokens needs.",
            "trace concentration": "Judge whether some experts are worth pinning.",
            "hotness": "Count how often each expert was chosen.",
            "simulate": "Simulate how often caches of experts would hit.",
        },
    }
)
"""The commands as help shows them; what people look for first stands first."""

_EXAMPLES = (
    "moepack run model.gguf --memory 8GiB",
    'moepack run model.gguf -p "Why?"',
    "moepack serve model.gguf --port 8080",
)
_HELP_WORDS = ("help", "-help", "--halp", "-?", "--?", "?", "/?")
_LEAST_WIDTH = 36


@contextlib.contextmanager
def until_nobody_reads() -> Iterator[None]:
    """End the program where standard output is a pipe that was closed, as by `head`: no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(ExitCode.PIPE_CLOSED) from None
    except OSError:
        try:
            sys.stdout.flush()
        except OSError:  # standard output it was that failed: it is full
            _drop_output()
        raise


def _drop_output() -> None:
    """Let nothing that is left to print fail once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Commands(click.Group):
    """A group of commands; without one it prints its help, as for `help`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.no_args_is_help = False
        self.subcommand_metavar = "COMMAND ..."
        self.group_class = Commands

    def add_command(self, command: click.Command, name: str | None = None) -> None:
        """Add a command, which has the group's options for help even without its context."""
        command.context_settings.setdefault("help_option_names", list(HELP_OPTIONS))
        super().add_command(command, name)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Make a context as wide as the terminal, also a narrow one; click has 50 columns."""
        columns = shutil.get_terminal_size().columns
        options.setdefault("terminal_width", max(_LEAST_WIDTH, min(columns, 80) - 2))
        with until_nobody_reads():
            return super().make_context(*arguments, **options)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the words behind the group; where there are none, show its help."""
        asks_for_help = all(word in _HELP_WORDS for word in args)
        return super().parse_args(context, ["--help"] if asks_for_help else args)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named and the words behind it. Raises UsageError."""
        name, *words = args
        if name == "help" and words:
            name, words = words[0], [*words[1:], "--help"]
        command = self.get_command(context, name)
        if context.resilient_parsing or (command is None and name[:1] == "-"):
            return super().resolve_command(context, [name, *words])
        if command is None:
            from moepack.cli.suggestions import unknown_command

            raise unknown_command(self, context, [name, *words])
        if len(words) == 1 and words[0] in _HELP_WORDS and not os.path.lexists(words[0]):
            words = ["--help"]
        if not isinstance(command, click.Group):
            words = _checked(context, command, words)
        return name, command, words

    def invoke(self, context: click.Context) -> Any:
        """Run the command that was named."""
        with until_nobody_reads():
            return super().invoke(context)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups, examples before them and the options behind."""
        path = " ".join(context.command_path.split()[1:])
        if not path:
            with formatter.section("Begin with"):
                indent = formatter.current_indent
                formatter.write("".join(f"{'':{indent}}{line}\n" for line in _EXAMPLES))
        for title, commands in GROUPS.items():
            rows = [(name, text) for name, text in commands.items() if name.startswith(path)]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=20, col_spacing=2)
        click.Command.format_options(self, context, formatter)


def _checked(context: click.Context, command: click.Command, words: list[str]) -> list[str]:
    """Return the words for a command, those that it has in other forms too. Raises UsageError."""
    if isinstance(command, CommandWithRest):
        words = command.expand_words(context, words)
    if is_doubtful(command, words):
        from moepack.cli.suggestions import check_words

        check_words(context, command, words)
    return command.settle_words(context, words) if isinstance(command, CommandWithRest) else words
