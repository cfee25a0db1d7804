"""`--csv` prints the rows of `--json`, each of their values in a column of its name."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from moepack.cli import main
from moepack.cli.words.front import commands_below
from tests.support.models import FIXTURES, first_shard
from tests.support.warm_command import Run

MODEL = first_shard("qwen3moe")
TRACE = FIXTURES / "qwen3moe-trace.csv"
PRESETS = ("--machine", "preset:dgx-spark", "--machine", "preset:mini-pc-32")
COMMANDS = {
    "simulate": ("results", (TRACE, "--model", MODEL, "--policies", "lru,lrfu")),
    "trace stats": ("working_set", (TRACE,)),
    "trace concentration": ("layers", (TRACE,)),
    "forecast": ("forecasts", (MODEL, *PRESETS[:2], "--all")),
    "locate": ("parts", (MODEL, "--layer", "1", "--expert", "2")),
    "models list": ("items", ()),
}


def leaves(name: str, value: Any) -> dict[str, str]:
    """Return the values within a value of JSON, by their names in CSV."""
    if not isinstance(value, dict | list):
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
        return {name: text}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, str] = {}
    for key, inner in items:
        found |= leaves(f"{name}.{key}".lstrip("."), inner)
    return found


def check(field: str, words: tuple[object, ...], cli: Run) -> None:
    rows = json.loads(cli(*words, "--json").stdout)[field]
    run = cli(*words, "--csv")
    assert run.returncode == 0, run.stderr
    table = [
        {name: text for name, text in row.items() if text}
        for row in csv.DictReader(io.StringIO(run.stdout))
    ]
    assert rows
    assert table == [{name: text for name, text in leaves("", row).items() if text} for row in rows]


@pytest.mark.parametrize("command", COMMANDS)
def test_csv_has_the_values_of_the_rows_in_json(
    command: str, cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "moepack").mkdir(mode=0o700)
    (tmp_path / "moepack" / f"index-{1:016x}.bin").write_bytes(bytes(9))
    field, words = COMMANDS[command]
    check(field, (*command.split(), *words), cli)


def test_machines_that_are_compared_are_rows(cli: Run) -> None:
    check("machines", ("forecast", MODEL, *PRESETS), cli)


def test_every_command_with_csv_is_tested() -> None:
    names = {
        name
        for name, command in commands_below(main.cli)
        if any("--csv" in param.opts for param in command.params)
    }
    assert names == {*COMMANDS, "list", "tune"}, "list has a test of its own, tune takes minutes"
