"""Groups of commands: bare `moepack`, its help in sections, and answers to unknown commands."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from moepack.cli.shared.exit_codes import ExitCode
from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word

HELP_OPTIONS = ("-h", "--help")
"""The options for help, the same for every command."""

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Run a model": {
        "run": "Run a model in the terminal: a chat, or an answer to -p.",
        "serve": "Serve a model to clients of OpenAI's and Anthropic's APIs.",
        "launch": "Start an agent, such as claude or codex, with a server for it.",
        "ps": "List the servers that run, with their figures.",
        "models list": "List fetched models, and files that are kept of any.",
        "models rm": "Remove them; your own files stay.",
    },
    "Measure and plan": {
        "inspect": "Describe a model or a pack: layers, experts, lengths.",
        "doctor": "Find the bottlenecks of this machine, and of a model on it.",
        "machine": "Measure memory and drive, for place and forecast.",
        "place": "Plan which weights go into VRAM, memory and the drive.",
        "forecast": "Forecast how fast a model will be on a machine.",
        "tune": "Find the fastest options of serve for a model here.",
        "bench": "Measure the drive, and the gain from a pack on it.",
        "report": "Make a page about a model: pictures and tables.",
    },
    "Pack a model": {
        "pack": "Make a pack of a model: one aligned read per expert.",
        "verify": "Verify a pack: its digests, or every byte of the model.",
        "repair": "Write back what is damaged in a pack, and no more.",
        "restore": "Write the GGUF of a pack again, bit for bit.",
        "export": "Write a pack for another engine: a GGUF, SGLang's files.",
        "mount": "Serve the GGUF of a pack as files, without storing it.",
        "pull": "Bring a pack from a store, or some of its experts.",
        "mirror": "Copy experts to a second drive, to read from both.",
        "index": "Index the experts of a GGUF, without a copy.",
        "rank": "Rank the experts of a pack by new counts.",
        "list": "List the experts of a pack: offset, length, hotness.",
        "locate": "Show the file and the offset of an expert's parts.",
        "extract": "Write the bytes of an expert to a file.",
        "include-dir": "Print the folder of moepack.h, for C and C++.",
    },
    "Routing traces": {
        "trace record": "Run a model on prompts, and record its routing.",
        "trace import": "Import traces of other programs.",
        "trace stats": "Print the working set: experts per window of tokens.",
        "trace concentration": "Judge whether the most used experts are worth pinning.",
        "hotness": "Count how often each expert was used.",
        "simulate": "Simulate the hit rates of expert caches.",
    },
}
"""The commands with their short help, the most wanted first."""

_EXAMPLES = (
    "moepack run model.gguf --memory 8GiB",
    'moepack run model.gguf -p "Why?"',
    "moepack serve model.gguf --port 8080",
)
_LEAST_LIKENESS = 0.75
_LEAST_WIDTH = 36


@contextlib.contextmanager
def until_nobody_reads() -> Iterator[None]:
    """End the program without an error if standard output is a closed pipe, as of `head`."""
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
    """Send the rest of standard output to nowhere, so that it does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def with_help(command: click.Command) -> click.Command:
    """Return a command with the options for help that all have, and defaults shown in it."""
    command.context_settings.setdefault("help_option_names", list(HELP_OPTIONS))
    command.context_settings.setdefault("show_default", True)
    return command


class Commands(click.Group):
    """A group of commands, which prints its help if none is named."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.no_args_is_help = False
        self.subcommand_metavar = "COMMAND ..."
        self.group_class = Commands

    def add_command(self, command: click.Command, name: str | None = None) -> None:
        """Add a command, with help as all have it."""
        super().add_command(with_help(command), name)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Make a context as wide as the terminal, also below click's least of 50 columns."""
        columns = shutil.get_terminal_size().columns
        options.setdefault("terminal_width", max(_LEAST_WIDTH, min(columns, 80) - 2))
        with until_nobody_reads():
            return super().make_context(*arguments, **options)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the group's name; without any, show its help."""
        asks_for_help = all(word == "help" for word in args)
        return super().parse_args(context, ["--help"] if asks_for_help else args)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the name, the command and the words after it. Raises UsageError."""
        name, *words = args
        if name == "help" and words:
            name, words = words[0], [*words[1:], "--help"]
        command = self.get_command(context, name)
        if context.resilient_parsing or (command is None and name[:1] == "-"):
            return super().resolve_command(context, [name, *words])
        if command is None:
            raise _unknown_command(context, name, words)
        _check_dashes(command, words)
        return name, command, words

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        with until_nobody_reads():
            return super().invoke(context)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, the commands in sections, and the options."""
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


def command_line(path: str, words: Sequence[str]) -> str:
    """Return the line for a command, quoted for a shell."""
    return " ".join(
        word if word == "{}" else shell_word(word) for word in ["moepack", *path.split(), *words]
    )


def commands_below(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield all commands of a group and of groups within it, with their full names."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_below(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def _unknown_command(context: click.Context, name: str, words: Sequence[str]) -> RequestError:
    """Return the error for a word that is no command, with the line that may be meant."""
    from difflib import get_close_matches

    root = context.find_root().command
    assert isinstance(root, click.Group)
    path = " ".join(["moepack", *context.command_path.split()[1:]])
    paths = {full.rpartition(" ")[2]: full for full, _ in commands_below(root)}
    near = [] if "." in name else get_close_matches(name.lower(), paths, 1, _LEAST_LIKENESS)
    if near:
        hint = command_line(paths[near[0]], words)
    elif name.startswith("llama-"):
        hint = f"moepack run MODEL.gguf -- {name} -m {{}}"
    elif name.endswith(".gguf") and context.command is root:
        hint = command_line("run", [name, *words])
    else:
        hint = f"{path} --help lists the commands"
    group = "" if context.command is root else f" of {path}"
    return RequestError(f"no such command{group}: {name}", hint=hint)


def _check_dashes(command: click.Command, words: Sequence[str]) -> None:
    """Raise NoSuchOption for a long option with one dash, which click takes for short ones."""
    names = {name for one in command.params for name in one.opts if name.startswith("--")}
    for word in words:
        name = word.partition("=")[0]
        if word == "--":
            return
        if len(name) > 2 and f"-{name}" in names:
            raise click.NoSuchOption(name, possibilities=[f"-{name}"])
