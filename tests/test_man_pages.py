"""There is a manual page for each command, with all that its page in docs/ says."""

import re
import shutil
from pathlib import Path

import click
import pytest

from docs import man_pages
from moepack.cli import main
from moepack.cli.words.front import commands_below
from tests.support.children import run_command

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "commands"
COMMANDS = {f"moepack-{name.replace(' ', '-')}": one for name, one in commands_below(main.cli)}


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the pages as the build of a wheel does; return their folder."""
    folder = tmp_path_factory.mktemp("man1")
    man_pages.write(PAGES, folder, "1.2.3")
    return folder


def rendered(page: Path) -> str:
    """Return a page as a terminal without styles shows it, and expect no warnings."""
    if shutil.which("groff") is None:
        pytest.skip("there is no groff here")
    done = run_command("groff", "-ww", "-man", "-Tutf8", "-P-cbou", page)
    assert (done.returncode, done.stderr) == (0, ""), page.name
    return done.stdout


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def test_there_is_a_page_for_each_command(manual: Path) -> None:
    assert {path.stem for path in manual.glob("*.1")} == {"moepack", *COMMANDS}


def test_a_page_has_the_options_of_its_command_and_each_word_of_its_page_in_docs(
    manual: Path,
) -> None:
    for name, command in COMMANDS.items():
        text = rendered(manual / f"{name}.1")
        for option in command.params:
            if isinstance(option, click.Option):
                assert re.search(rf"^ +{', '.join(option.opts)}\b", text, re.MULTILINE), name
        page = re.sub(r"\]\([^)]+\)|<!--.*-->|```toml", "", (PAGES / f"{name[8:]}.md").read_text())
        assert words(page.replace("| option | meaning |", "")) <= words(text), name


def test_code_text_and_links_are_what_a_reader_sees(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    for name in man_pages.COMMON:
        (tmp_path / "pages" / f"{name}.md").write_text("# A title\n\n    usage\n\nA summary.\n")
    (tmp_path / "pages" / "one.md").write_text(
        "# moepack one\n\n    moepack one\n\nDo it.\n\n"
        ".dot `a\\b` *em* **strong** [two](two.md)\n\n"
        "- it's 3 × 4\n- next\n\n```c\n'x' -\n\n.y\n```\n\n"
        "| option | meaning |\n| --- | --- |\n| `--way` a\\|b | The way. |\n"
    )
    man_pages.write(tmp_path / "pages", tmp_path, "1")
    text = rendered(tmp_path / "moepack-one.1")
    assert "moepack-one - Do it\n" in text
    assert "       .dot a\\b em strong two\n" in text
    assert "       • it's 3 × 4\n" in text
    assert "           'x' -\n\n           .y\n" in text
    assert "       --way a|b\n              The way.\n" in text
