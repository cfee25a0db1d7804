"""The pages for kinds of users: their commands run as they stand, one after another."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

import moepack
from tests.support.models import FIXTURES
from tests.support.needs import needs_llama, require_disk
from tests.support.warm_command import Run

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("run-a-model", "pack-and-ship", "measure-and-buy")
"""That for authors of engines is followed by tests/examples/test_document.py."""
QUICK = {
    "machine": "--seconds 0",
    "doctor": "--seconds 0",
    "bench": "--seconds 0 --depths 1 --length 64KiB --point-seconds 0.001",
    "run": "-n 4 --context 64",
    "record": "--tokens 2",
}
"""Options that make a command of a page as short as a test has to be."""
ELSEWHERE = re.compile(
    r"\w://| -- |^moepack (serve|mount|launch|tune)|^moepack bench .*--run|^moepack run \S+$"
)
"""What needs a network, another program or a reader, or takes long: it is only parsed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that answers, in one file."""
    folder = tmp_path_factory.mktemp("model")
    moepack.pack_model(FIXTURES / "chat-00001-of-00002.gguf", folder / "pack")
    moepack.export("gguf", folder / "pack", folder / "model.gguf")
    return folder / "model.gguf"


def commands(name: str) -> list[str]:
    """List the commands of a page that can be run here."""
    text = (DOCS / f"{name}.md").read_text()
    lines = re.findall(r"^    (moepack \w.*?)(?: +#.*)?$", text, re.MULTILINE)
    return [line for line in lines if not ELSEWHERE.search(line)]


def test_pages_for_users_are_short() -> None:
    for name in (*PAGES, "write-an-engine"):
        assert (DOCS / f"{name}.md").read_text().count("\n") <= 150


@needs_llama
@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_run_in_their_order(
    name: str, model: Path, tmp_path: Path, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_disk(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shutil.copy(model, tmp_path)
    (tmp_path / "prompts.txt").write_text("Why is the sky blue?\nWhat is a cat?\n" * 2)
    for toml in re.findall(r"```toml\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.DOTALL):
        (tmp_path / "offer.toml").write_text(toml)
    lines = commands(name)
    assert len(lines) >= 3
    for line in lines:
        words, _, target = line.partition(" > ")
        arguments = shlex.split(words)[1:]
        quick = next((QUICK[word] for word in arguments[:2] if word in QUICK), "")
        done = cli(*arguments, *shlex.split(quick), input="")
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        if target:
            (tmp_path / target).write_text(done.stdout)
