"""The first ten minutes of an author, as docs/write-an-engine.md tells them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.children import PATIENCE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-an-engine.md").read_text()
TEXT = PAGE + (ROOT / "docs" / "engine-hooks.md").read_text()
SECTION = PAGE.partition("## Ten minutes\n")[2].partition("\n## ")[0]
HEADER = "".join(path.read_text() for path in (ROOT / "include").glob("*.h"))


@pytest.mark.long
def test_the_commands_and_the_python_of_the_first_ten_minutes_work(tmp_path: Path) -> None:
    for program in ("cc", "rustc"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")
    shell = SECTION.partition("```")[0]
    commands, printed = re.findall(r"(?:^    .+\n)+", shell, re.MULTILINE)
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    (tmp_path / "build").mkdir()
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "moepack").write_text(f'#!/bin/sh\nexec {sys.executable} -m moepack "$@"\n')
    (bin_folder / "moepack").chmod(0o755)
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["sh", "-ec", commands],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.sub(r"^    ", "", printed, flags=re.MULTILINE) in run.stdout
    assert "\nlayer 1 expert 0 ffn_down_exps.weight: xxh3:" in run.stdout
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    command = [sys.executable, "-c", f"{code}\nprint(weights.shape)"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert output == "(64, 256)\n"


def test_the_document_names_functions_that_the_header_has() -> None:
    names = set(re.findall(r"`(moepack_\w+)", TEXT))
    assert len(names) >= 10
    for name in names:
        assert re.search(rf"^[\w *]+\b{name}\(", HEADER, re.MULTILINE), name


def test_every_example_is_listed_for_authors() -> None:
    for example in (ROOT / "examples").iterdir():
        if example.is_file():
            assert f"](../examples/{example.name})" in TEXT, example.name
