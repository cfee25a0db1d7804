"""The words of the library: its messages name arguments, and the command line says options."""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import click
import pytest

import moepack
from moepack.cli import main
from moepack.cli.main import cli
from moepack.cli.shared.argument_names import as_typed, option_name
from moepack.cli.shared.exit_codes import report
from moepack.cli.shared.terminal import lay_out
from moepack.cli.words.front import commands_below
from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word
from moepack.report.page import Page, Verbatim
from tests.support.needs import needs_llama

PACKAGE = Path(moepack.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z]")
COMMAND = re.compile(r"`[a-z0-9][\w-]* [^`]*`")
"""A whole command, which serves both: `moepack restore PACK --recover`, `cp --sparse=never`."""
WORD = re.compile(r"`([a-z][a-z0-9_]*)`")
ARGUMENT = re.compile(r"`([a-z][a-z0-9_]*)=([^`]+)`")

OTHER_WORDS = {
    "bench/engine_runs.py": "the command lines of the programs that are measured",
    "common/extras.py": "command lines of pip and uv",
    "pack/engines/anemll.py": "the engine's command line, and that of `moepack pack`",
    "pack/engines/moe_stream_dir.py": "the engine's command line",
    "pack/engines/sglang.py": "the engine's command line",
    "pack/mounting/mount.py": "options of docker",
    "planning/placing/engines.py": "the command line of `moepack run`, and llama.cpp's",
    "planning/forecasting/calibration.py": "a command line",
    "planning/forecasting/measured_runs.py": "a command line",
    "running/serving/access.py": "what is typed for llama-server, whose options it parses itself",
    "running/serving/gate.py": "what is typed for llama-server",
    "running/serving/prompt_cache.py": "what is typed for llama-server",
    "running/serving/installed_server.py": "what is typed for llama-server",
    "running/serving/server_memory.py": "llama.cpp's command line",
    "running/serving/clients.py": "the command lines of clients",
    "running/serving/server_options.py": "llama.cpp's command line",
    "running/programs/command.py": "llama.cpp's command line",
    "running/serving/drafts.py": "llama.cpp's command line",
    "running/serving/llama_server_options.py": "what is typed for llama-server",
    "running/programs/runner.py": "llama.cpp's command line",
    "running/serving/server.py": "what is typed for llama-server",
    "running/serving/model_server.py": "what is typed for llama-server",
    "report/html/drawing.py": "variables of CSS",
    "report/page.py": "what a terminal is told",
    "bench/tuning.py": "a command line",
    "source/folder.py": "command lines that download models",
    "source/shards.py": "a command line",
}
"""Modules with texts that are typed elsewhere, and the place."""


def modules() -> list[str]:
    """List the modules with texts of the library: without the command line and its output."""
    names = (path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    return sorted(
        name for name in names if not re.match(r"cli/|report/(.*_)?(text|section)\.py", name)
    )


@cache
def texts(module: str) -> list[str]:
    """List the texts in a module that are no docstrings; `…` stands for values put into them."""
    tree = ast.parse((PACKAGE / module).read_text())
    skipped: set[ast.AST] = set()
    every = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        if isinstance(node, ast.JoinedStr):
            skipped.update(ast.walk(node))
            pieces = [
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            ]
            every.append("".join(pieces))
        elif isinstance(node, ast.Constant) and node not in skipped and type(node.value) is str:
            every.append(node.value)
    return every


def test_messages_of_the_library_name_no_options() -> None:
    for module in modules():
        if module in OTHER_WORDS:
            assert any(OPTION.search(text) for text in texts(module)), "no exception is needed"
            continue
        for text in texts(module):
            assert not OPTION.search(COMMAND.sub("", text)), (module, text)


COMMANDS = [command for _, command in commands_below(cli)]


def test_arguments_with_values_are_options_of_some_command() -> None:
    """Else a message of the command line would show how Python writes it."""
    arguments = {match[0] for module in modules() for text in texts(module) for match in
             ARGUMENT.finditer(text)}  # fmt: skip
    assert len(arguments) > 7
    for text in arguments:
        assert any(as_typed(text, command).startswith("--") for command in COMMANDS), text


def test_arguments_that_messages_name_are_options_of_some_command() -> None:
    calls = (getattr(moepack, name) for name in moepack.__all__)
    signatures = [inspect.signature(call) for call in calls if inspect.isfunction(call)]
    arguments = {name for signature in signatures for name in signature.parameters}
    words = {
        word for module in modules() for text in texts(module) for word in WORD.findall(text)
    } & arguments
    assert len(words) > 15
    for word in words:
        assert any(as_typed(f"`{word}`", command)[0] != "`" for command in COMMANDS), word


@pytest.mark.parametrize(
    ("command", "text", "typed"),
    [
        ("pack", "continue with `resume=True`", "continue with --resume"),
        ("pack", "leave out `in_place`, `mtp=False`", "leave out --in-place, --no-mtp"),
        ("pack", "name one with `target`", "name one with --output"),
        ("pack", "give a `source`", "give a SOURCE"),
        ("pack", "`moepack restore x --recover`", "`moepack restore x --recover`"),
        ("forecast", "`cpu_layer_count=4` fits", "--n-cpu-moe 4 fits"),
        ("place", "`machine` says it, or `memory`", "--machine says it, or --ram"),
        ("run", "`learn=False`, `trace`", "--no-learn, --trace"),
        ("simulate", "`format` says it", "--format says it"),
        ("verify", "give a `source`", "give a --source"),
        ("list", "`resume=True`, `unzstd`", "`resume=True`, `unzstd`"),
    ],
)
def test_the_command_line_says_what_is_typed_there(command: str, text: str, typed: str) -> None:
    assert as_typed(text, cli.commands[command]) == typed


@needs_llama
@pytest.mark.parametrize("name", ["a`memory`c", "a/`memory`", "`memory`/b", "it's `memory` here"])
def test_names_of_files_stay_as_they_are(
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["run", name, "-p", "x"]) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"error: {name}: no such file")
    assert "--memory" not in said
    run = cli.commands["run"]
    hint = f"give more `memory`: {shell_word(name)}, model's `memory`"
    assert as_typed(hint, run, [name]) == hint.replace(" `memory`:", " --memory:").replace(
        "model's `memory`", "model's --memory"
    )


def test_errors_name_what_is_typed_in_what_is_wrong_and_expected_and_in_the_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = RequestError(
        "`memory` and `pin`",
        path="`memory` x",
        expected="`context`",
        found="`memory`",
        hint="less `pin` for '`memory` x'",
    )
    assert report(error, cli.commands["run"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: `memory` x: --memory and --pin, expected --context, found `memory`",
        "hint: less --pin for '`memory` x'",
    ]


def test_commands_to_paste_stay_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = cli.commands["run"]
    with click.Context(command) as context:
        context.params["source_or_pack"] = ("`memory` x",)
        lay_out(Page(Verbatim("run `memory`"), "`memory` x: `memory`"))
    assert capsys.readouterr().out == "run `memory`\n`memory` x: --memory\n"


def test_an_argument_at_fault_is_named_as_it_is_typed() -> None:
    assert option_name("memory", cli.commands["place"]) == "--ram"
    assert option_name("memory", cli.commands["run"]) == "--memory"
    assert option_name("layer", cli.commands["pack"]) == "layer"
