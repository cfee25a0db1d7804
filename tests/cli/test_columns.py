"""What every command prints on a terminal of 80 columns, and of 40: nothing is broken by it."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moepack.cli import main
from moepack.report.page import text_width
from tests.support.children import MOEPACK
from tests.support.machines import write_machine
from tests.support.models import FIXTURES
from tests.support.needs import needs_library, require_disk
from tests.support.terminals import on_terminal

pytestmark = pytest.mark.long
SHORT = "model-00001-of-00006.gguf"
COUNTED = (
    "blob|part|shard|file|layer|expert|token|run|round|request|selection|column|tensor|receipt"
    "|sweep|byte|thread|kind|window|lookup"
)
EXPONENT = re.compile(r"\d(\.\d+)?e[+-]?\d\d\b")
ONE_OF_MANY = re.compile(rf"(?<![\d.,-])1 ({COUNTED})s\b")

Prints = Callable[..., list[str]]


@pytest.fixture
def folder(tmp_path: Path, packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder that has a model, a pack, a trace, counts and two machines, briefly named."""
    for shard in sorted(FIXTURES.glob("qwen3moe-Q4_K_M-ntfs-t6-0*.gguf")):
        number = shard.name.partition("-t6-")[2]
        (tmp_path / f"model-{number}").symlink_to(shard)
    shutil.copytree(packs["qwen3moe"], tmp_path / "m.moepack")
    (tmp_path / "mirrored").mkdir()
    shutil.copy(FIXTURES / "qwen3moe-trace.csv", tmp_path / "t.csv")
    shutil.copy(FIXTURES / "qwen3moe-hotness.csv", tmp_path / "hot.csv")
    write_machine(tmp_path / "gpu.toml", vram=24, vram_bandwidth=936, bandwidth=40, drive=3)
    write_machine(tmp_path / "cpu.toml", bandwidth=40, drive=3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Prints:
    """Run a command as on a terminal of so many columns; return the lines that it prints."""

    def run(words: str, columns: int, *, code: int = 0) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "dumb")
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout.isatty", lambda: True)
            patch.setattr("sys.stderr.isatty", lambda: True)
            assert main.run(words.split()) == code
        printed = capsys.readouterr()
        return (printed.err + printed.out).splitlines()

    return run


COMMANDS = {
    "inspect a model": f"inspect {SHORT}",
    "inspect a pack": "inspect m.moepack",
    "pack": f"pack {SHORT} --hotness hot.csv -o new.moepack",
    "plan": f"pack {SHORT} --dry-run -o new.moepack",
    "index": f"index {SHORT} -o new.index",
    "rank": "rank m.moepack --hotness hot.csv",
    "verify": f"verify m.moepack --source {SHORT} --sha256",
    "locate in a pack": "locate m.moepack --layer 1 --expert 3",
    "locate in a model": f"locate {SHORT} --layer 1 --expert 3",
    "list a pack": "list m.moepack",
    "list a model": f"list {SHORT}",
    "extract": f"extract {SHORT} --layer 1 --expert 3 --part up -o up.bin",
    "restore": "restore m.moepack -o out",
    "export": "export gguf m.moepack -o out.gguf",
    "mirror": "mirror m.moepack mirrored",
    "import": "trace import t.csv -o t.moetrace",
    "stats": f"trace stats t.csv --model {SHORT}",
    "concentration": f"trace concentration t.csv --model {SHORT}",
    "hotness": f"hotness t.csv --model {SHORT} -o new.csv",
    "simulate": f"simulate t.csv --model {SHORT}",
    "forecast": f"forecast {SHORT} --machine gpu.toml --n-cpu-moe 1",
    "forecast all": f"forecast {SHORT} --machine gpu.toml --all",
    "forecast budgets": f"forecast {SHORT} --machine cpu.toml --all --trace t.csv",
    "place": f"place {SHORT} --machine gpu.toml",
    "place a pack": "place m.moepack --machine cpu.toml --trace t.csv",
    "machine": "machine m.moepack --seconds 0 -o new.toml",
    "doctor": "doctor m.moepack --seconds 0",
    "bench": f"bench m.moepack --source {SHORT} --seconds 0 --point-seconds 0.001",
    "bench a model": f"bench {SHORT} --seconds 0 --point-seconds 0.001",
}
WHOLE = ("inspect", "plan", "verify", "locate", "list", "extract")
"""Commands whose tables have all columns on a terminal of 80."""
MEASURE = ("machine", "doctor", "bench", "bench a model")
PASTED = ("next: ", "  llama-server ", "  moepack ")
"""How lines begin that are pasted as they are."""


NEXT = {
    "inspect a model": f"moepack run {SHORT}",
    "inspect a pack": "moepack run m.moepack",
    "pack": f"moepack verify new.moepack --source {SHORT}",
    "index": "moepack run new.index",
    "verify": "moepack run m.moepack",
    "list a model": f"moepack locate {SHORT} --layer 0 --expert 0",
    "export": "llama-server -m out.gguf",
    "mirror": "moepack run m.moepack",
    "import": "moepack hotness t.moetrace -o t-hotness.csv",
    "concentration": "moepack hotness t.csv -o t-hotness.csv",
    "simulate": f"moepack run {SHORT} --memory 1MiB",
    "hotness": f"moepack pack {SHORT} --hotness new.csv -o model.moepack",
    "machine": "moepack place m.moepack --machine new.toml",
    "doctor": "moepack run m.moepack",
}
"""The next steps that commands suggest; others suggest none, or one that they measure."""


@needs_library
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        *((name, 40) for name in COMMANDS),
        *((name, 80) for name in COMMANDS if name.startswith(WHOLE)),
    ],
)
def test_no_line_is_wider_than_the_terminal_and_the_next_step_has_the_real_names(
    name: str, columns: int, folder: Path, prints: Prints
) -> None:
    if name in MEASURE:
        require_disk(folder)
    lines = prints(COMMANDS[name], columns)
    assert lines
    text = "\n".join(lines)
    wide = [line for line in lines if text_width(line) > columns and " " in line.strip()]
    wide = [line for line in wide if not line.startswith(PASTED)]
    assert not wide, text
    assert not EXPONENT.search(text), text
    assert not ONE_OF_MANY.search(text), text
    assert " 0 B/s" not in text
    if columns == 80:
        assert "left out" not in text
    if name in NEXT:
        assert lines[-1] == f"next: {NEXT[name]}"
    assert text.count("next: ") == (name in NEXT or "forecast" in name)


def test_a_pipe_gets_all_columns_and_no_next_step_of_an_answer(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for name in ("verify", "inspect a model", "forecast all", "simulate", "concentration"):
        assert main.run(COMMANDS[name].split()) == 0
        text = capsys.readouterr().out
        assert "left out" not in text
        assert "next: moepack run" not in text


def test_names_of_the_next_step_are_quoted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["index", SHORT, "-o", "my index", "--threads", "1"]) == 0
    assert capsys.readouterr().out.endswith("\nnext: moepack run 'my index'\n")


@pytest.mark.long
def test_a_real_terminal_is_measured_and_its_errors_break_at_words(folder: Path) -> None:
    size = 'stty cols 44 rows 24 && unset COLUMNS && exec "$@"'
    command = ("sh", "-c", size, "sh", *MOEPACK)
    listed = on_terminal(*command, "list", "m.moepack").splitlines()
    assert max(map(len, listed)) <= 44
    assert listed[0].split() == ["layer", "expert", "hotness", "length"]
    refused = on_terminal(*command, "extract", SHORT, "--layer", "0", "--expert", "0", "-o", "x")
    lines = re.sub(r"\x1b\[[\d;]*m", "", refused).splitlines()
    assert max(map(len, lines[:-1])) <= 44
    words = " ".join(" ".join(lines[:-1]).split())
    assert words.endswith("expert 0 has no blob: its parts lie apart in the shards")
    assert lines[-1].startswith("hint: name one with --part, such as ")
