"""What adds an extra, by how moepack was installed: in processes that see that installation.

And that an installation works by itself.
"""

import json
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.models import first_shard

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODE = "from moepack import extras; print(extras.hint('plot'))"


def run(python: Path | str, folder: Path, *, path: str = "/usr/bin:/bin") -> list[str]:
    """Print the hint as moepack in `folder` gives it; return it as a shell would read it."""
    requirements = Path(pytest.__file__).parent.parent
    environment = {"PYTHONPATH": f"{folder}:{requirements}", "PATH": path}
    command = [str(python), "-S", "-P", "-c", CODE]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return shlex.split(found.stdout)


def copied(folder: Path, *names: str) -> Path:
    """Copy folders and files of the checkout."""
    for name in names:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
        else:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay moepack out as pip does, in a folder that tests change and leave as it was."""
    folder = copied(tmp_path_factory.mktemp("packages"), "moepack")
    notes = folder / "moepack-0.1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.4\nName: moepack\nVersion: 0.1.0\n")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install moepack as a user would; requirements come from this Python."""
    folder = tmp_path_factory.mktemp("installed")
    home = folder / "venv"
    venv.create(home, with_pip=False)
    packages = next((home / "lib").glob("python3*")) / "site-packages"
    (packages / "requirements.pth").write_text(str(Path(pytest.__file__).parent.parent))
    (folder / "copy").mkdir()
    project = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
    copy = copied(folder / "copy", "moepack", "layouts", "include", *project)
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(home / "bin" / "python")]
    options = ["--no-deps", "--no-compile", "--ignore-installed", "--no-build-isolation"]
    subprocess.run([*pip, "install", *options, f"{copy}[plot]"], check=True)
    return home


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "moepack[plot]"),
        ([], "moepack[plot]"),
        ({"url": "file:///a%20b/moepack", "dir_info": {}}, "/a b/moepack[plot]"),
        (
            {"url": "file:///tmp/moepack-0.1.0-py3-none-any.whl", "archive_info": {}},
            "moepack[plot] @ file:///tmp/moepack-0.1.0-py3-none-any.whl",
        ),
        (
            {"url": "ssh://git@host/moepack", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"moepack[plot] @ git+ssh://git@host/moepack@{COMMIT}",
        ),
    ],
)
def test_an_extra_comes_from_where_moepack_came_from(
    laid_out: Path, origin: object, requirement: str
) -> None:
    url = laid_out / "moepack-0.1.0.dist-info" / "direct_url.json"
    if origin is not None:
        url.write_text(json.dumps(origin))
    hint = run(sys.executable, laid_out)
    url.unlink(missing_ok=True)
    assert hint == [sys.executable, "-m", "pip", "install", requirement]


def test_a_checkout_stays_one(tmp_path: Path) -> None:
    checkout = tmp_path / "it's here"
    checkout.mkdir()
    copied(checkout, "moepack", "pyproject.toml")
    assert run(sys.executable, checkout)[3:] == ["install", "-e", f"{checkout}[plot]"]


@pytest.mark.slow
def test_pip_is_named_as_it_is_found_where_it_is_that_of_this_python(
    tmp_path: Path, laid_out: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    ours = run(programs / "python", laid_out, path=f"{programs}:/bin")
    assert ours == ["pip", "install", "moepack[plot]"]
    others = run(programs / "python", laid_out)
    assert others[:3] == [str(programs / "python"), "-m", "pip"]


def test_the_hint_of_a_folder_that_was_installed_works(home: Path) -> None:
    """What pip was given, and took, is what the hint gives it again."""
    found = subprocess.run(
        [home / "bin" / "python", "-c", CODE], cwd=home, env={}, stdout=subprocess.PIPE, text=True
    )
    assert shlex.split(found.stdout)[-1] == f"{home.parent / 'copy'}[plot]"


def test_what_was_installed_works_outside_of_the_checkout(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layouts included."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it would find the checkout again
    command = [str(home / "bin" / "moepack"), "pack", str(first_shard("qwen3moe")), "--json"]
    for name in ("layers", "hot-first"):
        target = ["-o", str(tmp_path / name), "--layout", name]
        done = subprocess.run([*command, *target], cwd=tmp_path, capture_output=True, check=True)
        assert json.loads(done.stdout)["layout"] == name
    where = [str(home / "bin" / "python"), "-c", "import moepack; print(moepack.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    package = Path(found.stdout.strip()).parent
    assert package.is_relative_to(home)
    assert (package / "py.typed").exists()
