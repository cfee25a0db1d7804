"""What a wheel brings beside the package: layouts, headers, examples, manual pages."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs import man_pages
from tests.support.children import PATIENCE, run_command
from tests.support.models import first_shard

ROOT = Path(__file__).parent.parent
BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
for path in WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=["standard"]):
    print(path)
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a wheel as a user would, and return the folder; requirements come from elsewhere."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("a wheel")
    environment = os.environ | {"PATH": "/nothing"}  # no compiler, which takes longer
    command = [sys.executable, "-c", BUILD, str(ROOT), str(folder)]
    output = subprocess.check_output(command, text=True, timeout=PATIENCE, env=environment)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    # Else pip would uninstall the one that these tests run, and compile what few of them import.
    pip += ["--ignore-installed", "--no-compile"]
    wheel = output.splitlines()[-1]
    done = run_command(*pip, "--prefix", folder / "here", wheel)
    assert done.returncode == 0, done.stderr
    return folder / "here"


@pytest.fixture
def site(prefix: Path) -> Path:
    """Return the folder that Python imports from."""
    return next(prefix.glob("lib/python3*/site-packages"))


def printed(site: Path, folder: Path, *words: object) -> str:
    """Return what Python prints outside of the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, *map(str, words)]
    return subprocess.check_output(command, cwd=folder, env=environment, text=True)


def test_the_manual_has_a_page_for_each_command(prefix: Path, tmp_path: Path) -> None:
    man_pages.write(ROOT / "docs" / "commands", tmp_path, "1.2.3")
    installed = {path.name for path in (prefix / "share/man/man1").iterdir()}
    assert installed == {path.name for path in tmp_path.iterdir()}


def test_headers_and_examples_lie_as_in_a_checkout(site: Path, tmp_path: Path) -> None:
    include = Path(printed(site, tmp_path, "-m", "moepack", "include-dir").rstrip("\n"))
    assert include.is_relative_to(site)
    for folder in ("include", "examples"):
        files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()]
        for name in (one for one in files if "__pycache__" not in one.parts):
            assert (include.parent / name).read_bytes() == (ROOT / name).read_bytes()


def test_it_works_outside_of_the_checkout(site: Path, tmp_path: Path) -> None:
    """Layouts included, and the hint for an extra is to add it to what is installed."""
    for name in ("layers", "hot-first"):
        words = ("pack", first_shard("qwen3moe"), "--json", "-o", name, "--layout", name)
        assert json.loads(printed(site, tmp_path, "-m", "moepack", *words))["layout"] == name
    code = "from moepack.common import extras; print(extras.__file__); print(extras.hint('report'))"
    path, hint = printed(site, tmp_path, "-c", code).splitlines()
    assert (site / "moepack" / "py.typed").exists()
    assert Path(path).is_relative_to(site)
    assert shlex.split(hint)[-3:] == ["pip", "install", "moepack[report]"]
