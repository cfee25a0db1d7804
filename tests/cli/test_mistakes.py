"""What people mistype, and what they are told: the table in docs/development.md, row by row."""

import re
import shlex
from pathlib import Path

import pytest

from moepack.cli import main
from moepack.cli.typed_words import typed
from tests.support.desk import lay_out

_DOCUMENT = Path(__file__).parents[2] / "docs" / "development.md"
_ROW = re.compile(r"^\| `(.+?)` \| (\d+) \| (.+) \|$", re.MULTILINE)
_SECTION = _DOCUMENT.read_text().partition("\n## Mistakes\n")[2].partition("\n## ")[0]
ROWS = [
    (line, int(code), re.findall(r"`(.+?)`", names)) for line, code, names in _ROW.findall(_SECTION)
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay out a folder that no mistake may change."""
    return lay_out(tmp_path_factory.mktemp("desk"))


def test_the_table_has_at_least_sixty_mistakes() -> None:
    assert len(ROWS) >= 60
    assert len({line for line, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("line", "code", "names"), ROWS, ids=[line for line, _, _ in ROWS])
def test_a_mistake_is_answered_with_what_to_type_instead(
    line: str,
    code: int,
    names: list[str],
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(desk)
    before = sorted(desk.rglob("*"))
    assert main.run(shlex.split(line)) == code
    said = capsys.readouterr()
    assert code in (2, 3, 4, 6)
    assert re.search("^error: ", said.err, re.MULTILINE)
    assert "Traceback" not in said.err
    assert names
    for name in names:
        assert name in said.err
    assert sorted(desk.rglob("*")) == before


@pytest.mark.parametrize(
    "line", ["run -m model-00001-of-00006.gguf -- nosuch", "run model.moepack -- nosuch"]
)
def test_a_program_that_is_not_there_is_no_mistake_in_the_words_before_it(
    line: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    assert main.run(shlex.split(line)) == 127
    assert capsys.readouterr().err.splitlines() == [
        "error: nosuch: no such program",
        "hint: it is in none of the folders of PATH",
    ]


def test_what_is_told_can_be_pasted(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command line that is told can be parsed, and is not the one that was typed."""
    monkeypatch.chdir(desk)
    count = 0
    for line, _, _ in ROWS:
        main.run(shlex.split(line))
        for hint in re.findall("^hint: moepack (.+)$", capsys.readouterr().err, re.MULTILINE):
            if hint.split()[0] not in main.cli.commands:
                continue
            told = typed(main.cli, shlex.split(hint))
            assert told.command.make_context(told.path, list(told.words)), hint
            assert hint != line
            count += 1
    assert count > 60
