"""The front door: bare `moepack`, help as people ask for it, words put where they belong."""

import re
import shlex

import pytest

import moepack
from moepack.cli import main
from moepack.cli.words import front
from moepack.cli.words.front import commands_below


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
            assert columns < 80 or f"  {sentence}\n" in text


def test_each_command_has_its_place_and_run_is_the_first() -> None:
    names = [name for commands in front.GROUPS.values() for name in commands]
    assert names[0] == "run"
    below = {re.sub("^export .*", "export", name) for name, _ in commands_below(main.cli)}
    assert sorted(names) == sorted(below)
    assert len(set(names)) == len(names)


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


def test_the_bare_group_of_exports_shows_what_each_format_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = output(capsys, "export")
    assert text == output(capsys, "export", "--help") == output(capsys, "help", "export")
    for engine in moepack.export_formats():
        section = " ".join(text.partition(f"\n{engine.name}, for {engine.title}:\n")[2].split())
        for phrase in (engine.reads, engine.writes, engine.copies, engine.proof):
            assert phrase in section


def test_a_bare_group_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "trace")
    assert text == output(capsys, "trace", "--help")
    for name, sentence in ((n, s) for g in front.GROUPS.values() for n, s in g.items()):
        assert (f"  {name} " in text) == name.startswith("trace"), (name, sentence)


@pytest.mark.parametrize(
    ("words", "same_as"),
    [
        (["help"], ["--help"]),
        ([], ["--help"]),
        (["-h"], ["--help"]),
        (["help", "run"], ["run", "--help"]),
        (["help", "trace"], ["trace", "--help"]),
        (["help", "trace", "import"], ["trace", "import", "--help"]),
        (["trace", "help"], ["trace", "--help"]),
        (["trace", "help", "import"], ["trace", "import", "--help"]),
        (["help", "help"], ["--help"]),
    ],
)
def test_help_is_given_however_it_is_asked_for(
    words: list[str], same_as: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert output(capsys, *words) == output(capsys, *same_as)


def test_completion_is_no_mistake() -> None:
    context = main.cli.make_context("moepack", ["chat"], resilient_parsing=True)
    assert main.cli.resolve_command(context, ["chat"])[1] is None
