"""The command `launch`: an agent, or another client, with a server for it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from moepack.cli.run import serve, served_name
from moepack.cli.running.models import fetch, note, require_engine
from moepack.cli.shared.exit_codes import ExitCode
from moepack.cli.shared.options import flag_option, number_option
from moepack.cli.shared.progress import watched_progress
from moepack.cli.shared.terminal import complain, is_quiet, next_line, say
from moepack.cli.words.llama_command import LlamaCommand
from moepack.common.errors import MoepackError
from moepack.common.escaping import one_line, shell_word, shell_words
from moepack.common.sizes import count_text
from moepack.running.programs.executable import NOT_FOUND, CommandError, find_executable
from moepack.running.serving.clients import CLIENTS, Client, Endpoint, Settings

if TYPE_CHECKING:
    from moepack.running.serving.model_server import ListeningProcess

_KEY, _SERVER_KEY = "MOEPACK_API_KEY", "LLAMA_API_KEY"
_NO_KEY = "moepack"
"""Key for a server that asks for none: clients need one."""
_TYPED = "moepack.typed"
_OPTION = "--api-key"
_NOT_TAKEN = ("port", "log_format")
"""Options of `serve` with another default, and without which its address is printed as text."""
_THIS_MACHINE = "127.0.0.1,localhost"


class _LaunchCommand(LlamaCommand):
    """A command that takes the words of `serve`, and keeps them for it as they were typed."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the words before `--`. Raises RequestError for options that are answered."""
        context.meta[_TYPED] = args[: args.index("--")] if "--" in args else list(args)
        return super().parse_args(context, args)

    def line_with_options(self, model: str, words: Sequence[str]) -> str:
        """Return the hint for options of llama-server, behind whose `--` are the client's."""
        return "options of llama-server are variables here, such as LLAMA_ARG_N_PARALLEL=2"


@click.command(
    cls=_LaunchCommand,
    rest_metavar="ARGUMENTS OF THE CLIENT",
    params=[
        click.Argument(["client"], type=click.Choice(list(CLIENTS))),
        *(one for one in serve.params if one.name not in _NOT_TAKEN),
    ],
)
@number_option("--port", least=0, most=65535, default=0, help="TCP port; 0 is any free one.")
@flag_option("--dry-run", help="Print both commands and the settings; start nothing.")
@click.pass_context
def launch(
    command: click.Context,
    /,
    client: str,
    source_or_pack: tuple[str, ...],
    dry_run: bool,
    host: str,
    port: int,
    api_key: str | None,
    name: str | None,
    context: int | None,
    wanted_context: int,
    rest: tuple[str, ...] | None,
    **others: Any,
) -> None:
    """Start an agent, or another client, with a server for it.

    The server is that of `moepack serve`, with its options, at a free port. The client starts when
    the model is loaded, with variables and temporary files that lead it there; its arguments go
    after `--`. When it ends, the server ends.

    Example: moepack launch claude model.gguf --memory 8GiB

    Example: moepack launch llm model.gguf -- "Why is the sky blue?"
    """
    chosen, key = CLIENTS[client], api_key or os.environ.get(_SERVER_KEY)
    model = one_line(name) if name else served_name(source_or_pack)
    words = _words_of_serve(command.meta[_TYPED], client)
    words += [] if port else ["--port", "0"]
    words += [] if name else ["--name", model]
    if context is None and not wanted_context:
        words += ["--wanted-context", str(chosen.context)]
    if dry_run:
        place = f"http://{host}:{port or 'PORT'}"
        length = context or wanted_context or chosen.context
        folder = Path(tempfile.gettempdir(), "moepack-launch-FOLDER")
        endpoint = Endpoint(place, model, f"${_KEY}" if key else _NO_KEY, length, folder)
        _print_plan(words, chosen, chosen.settings(endpoint), rest or ())
        return
    from moepack.running.programs.process import end_like

    executable = _find(chosen)
    require_engine(source_or_pack, others["server_program"])
    fetch(source_or_pack)  # with its progress on the terminal, not in the log
    with _server(words, key) as (server, log_path):
        returncode = _run(chosen, executable, server, log_path, model, key, rest or ())
    command.exit(end_like(returncode))


def _words_of_serve(typed: Sequence[str], client: str) -> list[str]:
    """Return the typed words that `serve` has too, less the key, which others could see."""
    words = [word for word in typed if word != "--dry-run" and not word.startswith(f"{_OPTION}=")]
    words.remove(client)
    while _OPTION in words:
        start = words.index(_OPTION)
        del words[start : start + 2]
    return words


def _print_plan(
    words: Sequence[str], client: Client, settings: Settings, arguments: Sequence[str]
) -> None:
    """Print what would be started, and the settings; a key is named, not shown."""
    say(f"server: {next_line('serve', *words)}")
    say(f"client: {shell_words([client.program, *settings.arguments, *arguments])}")
    for name, value in settings.variables.items():
        word = f'"{value}"' if value == f"${_KEY}" else shell_word(value)
        say(f"variable: {name}={word}")
    for name, text in settings.files.items():
        say(f"file {name}: {text}")


def _find(client: Client) -> Path:
    """Return the executable of a client. Raises CommandError if it is not installed."""
    try:
        return find_executable(client.program)
    except CommandError as error:
        if error.exit_code != NOT_FOUND:
            raise
        problem = "not installed, or in none of the folders of PATH"
        raise CommandError(
            problem, path=client.program, exit_code=NOT_FOUND, hint=client.install
        ) from None


@contextmanager
def _server(words: Sequence[str], key: str | None) -> Iterator[tuple[ListeningProcess, str]]:
    """Yield a server by the command `serve`, once it answers, and the path of its log."""
    from moepack.running.serving.model_server import ListeningProcess

    descriptor, log_path = tempfile.mkstemp(prefix="moepack-launch-", suffix=".log")
    # A module of the folder in which the client works is not to take the place of Python's.
    variables = {"PYTHONSAFEPATH": "1", **({} if key is None else {_KEY: key})}
    command = [sys.executable, "-m", "moepack", "serve", *words]
    log = os.fdopen(descriptor, "r+b")
    with ListeningProcess(command, variables, log) as server:
        try:
            with watched_progress("loading the model", "s"):
                _ = server.url
        except MoepackError:
            say(server.log().rstrip(), err=True)
            code = server.returncode or ExitCode.FAILED
            raise SystemExit(code if code > 0 else ExitCode.MACHINE_FAULT) from None
        yield server, log_path


def _run(
    client: Client,
    executable: Path,
    server: ListeningProcess,
    log_path: str,
    model: str,
    key: str | None,
    arguments: Sequence[str],
) -> int:
    """Run a client to its end; return its exit code, or -N if signal N killed it."""
    from moepack.running.programs.process import in_foreground
    from moepack.running.serving.client import ServerClient

    facts = ServerClient(server.url, key).request("/props")
    length = int(facts["default_generation_settings"]["n_ctx"])
    if not is_quiet():
        say(f"{model} with {count_text(length, 'token')} of context; log: {log_path}", err=True)
    if length < client.context:
        least = count_text(client.context, "token")
        note(f"{client.program} is meant for {least} of context: long prompts will fail")
    with tempfile.TemporaryDirectory(prefix="moepack-launch-") as folder:
        endpoint = Endpoint(server.url, model, key or _NO_KEY, length, Path(folder))
        settings = client.settings(endpoint)
        for name, text in settings.files.items():
            Path(folder, name).write_text(text)
        words = [client.program, *settings.arguments, *arguments]
        environment = _environment(settings.variables, server.url)
        with in_foreground(executable, words, environment) as process:
            returncode = process.wait()
    assert returncode is not None
    if not server.is_running:
        complain("error", f"the server has ended, with code {server.returncode}: {log_path}")
    return returncode


def _environment(variables: Mapping[str, str], url: str) -> dict[str, str]:
    """Return the environment of a client, which reaches this machine and the server by no proxy."""
    host = urlsplit(url).hostname
    direct = {
        name: ",".join(filter(None, [os.environ.get(name), _THIS_MACHINE, host]))
        for name in ("NO_PROXY", "no_proxy")
    }
    return {**os.environ, **direct, **variables}
