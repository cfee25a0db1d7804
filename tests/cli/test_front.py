"""The front door: bare `moepack`, help as people ask for it, words put where they belong."""

import re
import shlex
from pathlib import Path

import click
import pytest

from moepack.cli import front, main
from moepack.cli.typed_words import commands_below
from tests.support.terminals import MOEPACK, on_terminal


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command that ends well prints, to standard output alone."""
    assert main.run(list(words)) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_bare_moepack_shows_whole_sentences_that_fit(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = output(capsys)
    assert "…" not in text
    assert "..." not in text.replace("COMMAND ...", "")
    assert max(map(len, text.splitlines())) <= columns
    for commands in front.GROUPS.values():
        for name, sentence in commands.items():
            assert sentence.endswith(".")
            assert re.search(rf"^  {name} .*", text, re.MULTILINE)
            assert sentence in " ".join(text.split())


def test_each_command_has_its_place_and_run_is_the_first() -> None:
    names = [name for commands in front.GROUPS.values() for name in commands]
    assert names[0] == "run"
    assert sorted(names) == sorted(name for name, _ in commands_below(main.cli))
    assert len(set(names)) == len(names)


def test_a_sentence_has_one_line_on_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = output(capsys)
    for commands in front.GROUPS.values():
        for sentence in commands.values():
            assert f"  {sentence}\n" in text


def test_examples_stand_first_and_can_be_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys)
    examples = re.findall(r"^  moepack (.+)$", text, re.MULTILINE)
    assert len(examples) >= 3
    assert text.index(examples[0]) < text.index("Run a model:")
    for example in examples:
        name, *words = shlex.split(example)
        assert main.cli.commands[name].make_context(name, words)


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("name", [name for name, _ in commands_below(main.cli)])
def test_each_command_prints_its_help(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, *name.split(), option)
    assert f"moepack {name} " in text
    assert text == output(capsys, *name.split(), "model.gguf", option)


@pytest.mark.parametrize("group", ["trace", "export"])
def test_a_bare_group_shows_its_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, group)
    assert text == output(capsys, group, "--help")
    for name, sentence in ((n, s) for g in front.GROUPS.values() for n, s in g.items()):
        assert (f"  {name} " in text) == name.startswith(group), (name, sentence)


@pytest.mark.parametrize(
    ("words", "same_as"),
    [
        (["help"], ["--help"]),
        ([], ["--help"]),
        (["-h"], ["--help"]),
        (["-help"], ["--help"]),
        (["?"], ["--help"]),
        (["help", "run"], ["run", "--help"]),
        (["run", "help"], ["run", "--help"]),
        (["run", "-help"], ["run", "--help"]),
        (["help", "trace"], ["trace", "--help"]),
        (["help", "trace", "import"], ["trace", "import", "--help"]),
        (["trace", "help"], ["trace", "--help"]),
        (["trace", "help", "import"], ["trace", "import", "--help"]),
        (["trace", "import", "help"], ["trace", "import", "--help"]),
        (["help", "help"], ["--help"]),
    ],
)
def test_help_is_given_however_it_is_asked_for(
    words: list[str], same_as: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert output(capsys, *words) == output(capsys, *same_as)


def test_a_file_called_help_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "help").write_text("not a model")
    monkeypatch.chdir(tmp_path)
    assert main.run(["inspect", "help"]) == 3
    assert "not a GGUF" in capsys.readouterr().err


@pytest.mark.long
def test_on_a_narrow_terminal_no_line_is_longer_than_it() -> None:
    text = on_terminal(*MOEPACK, columns=44)
    assert max(map(len, text.replace("\r", "").splitlines())) <= 44


def settled(line: str) -> list[str]:
    """Return the words that `run` parses, of those that were typed behind it."""
    words = ["run", *shlex.split(line)]
    return main.cli.resolve_command(main.cli.make_context("moepack", words), words)[2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("MODEL 'Why is it?'", ["MODEL", "-p", "Why is it?"]),
        ("MODEL --memory 8GiB 'Why is it?'", ["MODEL", "--memory", "8GiB", "-p", "Why is it?"]),
        ("MODEL 'Why is it?' -n 3", ["MODEL", "-p", "Why is it?", "-n", "3"]),
        ("MODEL -- prog 'Why is it?'", ["MODEL", "--", "prog", "Why is it?"]),
        ("MODEL -p 'a b' 'c d'", ["MODEL", "-p", "a b", "c d"]),
        ("'a b.gguf'", ["a b.gguf"]),
        ("MODEL 'summarise notes.gguf'", ["MODEL", "-p", "summarise notes.gguf"]),
        ("MODEL '/etc is what'", ["MODEL", "-p", "/etc is what"]),
        ("MODEL 'nowhere/ is what'", ["MODEL", "-p", "nowhere/ is what"]),
        ("MODEL 'llama-3 or llama-4, which?'", ["MODEL", "-p", "llama-3 or llama-4, which?"]),
        ("MODEL './a b.gguf'", ["MODEL", "./a b.gguf"]),
        ("MODEL '~/a b.gguf'", ["MODEL", "~/a b.gguf"]),
        ("model-00001-of-00006.gguf 'a b'", ["model-00001-of-00006.gguf", "a b"]),
    ],
)
def test_a_last_argument_that_is_no_path_is_a_prompt(
    line: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").touch()
    (tmp_path / "MODEL").touch()
    monkeypatch.chdir(tmp_path)
    assert settled(line) == words


@pytest.mark.parametrize(
    "line",
    [
        "pack SOURCE -o x -qv",
        "verify PACK -q --sample=10%",
        "locate PACK --layer 0 --expert=3",
        "run SOURCE -n3 -s7 -ub 64",
        "run SOURCE -qn2 -p hi",
        "run SOURCE -qvn2",
        "run SOURCE -p --raw",
        "run SOURCE -p -ngl",
        "trace import a.csv -ofile.moetrace",
        "serve SOURCE -t4 --port=80",
    ],
)
def test_options_as_click_reads_them_are_not_mistyped(line: str) -> None:
    """Short ones in one word, with their values, and words that look like options in values."""
    words = shlex.split(line)
    context = main.cli.make_context("moepack", words)
    name, command, rest = main.cli.resolve_command(context, words)
    assert name == words[0]
    if isinstance(command, click.Group):
        command.resolve_command(command.make_context(name, rest, parent=context), rest)


def test_completion_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    context = main.cli.make_context("moepack", ["chat"], resilient_parsing=True)
    assert main.cli.resolve_command(context, ["chat"])[1] is None
