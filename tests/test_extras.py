"""What adds an extra, by how moepack was installed: in processes that see that installation."""

import json
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

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


def installed(folder: Path, origin: object = None) -> Path:
    """Lay moepack out as pip does, with what it notes of where the package came from."""
    shutil.copytree(
        ROOT / "moepack", folder / "moepack", ignore=shutil.ignore_patterns("__pycache__")
    )
    notes = folder / "moepack-0.1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.4\nName: moepack\nVersion: 0.1.0\n")
    if origin is not None:
        (notes / "direct_url.json").write_text(json.dumps(origin))
    return folder


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
    tmp_path: Path, origin: object, requirement: str
) -> None:
    hint = run(sys.executable, installed(tmp_path, origin))
    assert hint == [sys.executable, "-m", "pip", "install", requirement]


def test_a_checkout_stays_one(tmp_path: Path) -> None:
    checkout = tmp_path / "it's here"
    installed(checkout, {"url": "file:///elsewhere", "dir_info": {}})
    (checkout / "pyproject.toml").touch()
    assert run(sys.executable, checkout)[3:] == ["install", "-e", f"{checkout}[plot]"]


@pytest.mark.slow
def test_pip_is_named_as_it_is_found_where_it_is_that_of_this_python(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    folder = installed(tmp_path / "packages")
    ours = run(programs / "python", folder, path=f"{programs}:/bin")
    assert ours == ["pip", "install", "moepack[plot]"]
    others = run(programs / "python", folder)
    assert others[:3] == [str(programs / "python"), "-m", "pip"]


@pytest.mark.long
def test_the_hint_of_a_folder_that_was_installed_works(tmp_path: Path) -> None:
    """Up to what pip would fetch: it resolves the extra's requirement from the folder."""
    copy = tmp_path / "copy"
    for name in ("moepack", "layouts", "include"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python)]
    options = ["--no-deps", "--ignore-installed", "--no-build-isolation"]
    packages = next((home / "lib").glob("python3*")) / "site-packages"
    (packages / "requirements.pth").write_text(str(Path(pytest.__file__).parent.parent))
    subprocess.run([*pip, "install", *options, str(copy)], check=True)
    found = subprocess.run(
        [str(python), "-c", CODE], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
    )
    requirement = shlex.split(found.stdout)[-1]
    assert requirement == f"{copy}[plot]"
    again = subprocess.run(
        [*pip, "install", *options, "--dry-run", requirement], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
