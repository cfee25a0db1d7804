"""What adds an extra, by how moepack was installed: in processes that see that installation.

And that an installation works by itself.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import xxhash

from moepack import extras
from tests.support.models import first_shard, pack_model

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
    package = Path(str(xxhash.__file__)).parent  # all that `import moepack` needs
    (folder / "xxhash").symlink_to(package)
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


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment without pip, which tests put notes into and take out again."""
    folder = tmp_path_factory.mktemp("environments") / "moepack"
    venv.create(folder, with_pip=False)
    return folder


def told(environment: Path, packages: Path, code: str, path: str = "/usr/bin:/bin") -> str:
    """Print what moepack in `packages` says in an environment that has nothing else."""
    command = [
        str(environment / "bin" / "python"),
        "-P",
        "-c",
        f"from moepack import extras; {code}",
    ]
    names = {"PYTHONPATH": str(packages), "PATH": path}
    end = subprocess.run(command, env=names, capture_output=True, text=True, check=True)
    return end.stdout.strip()


UV_RECEIPT = """
[tool]
requirements = [
    { name = "moepack", extras = ["run"], path = "/x/moepack.whl" },
    { name = "ziglang", specifier = ">=0.15" },
]
python = "3.12"
"""


@pytest.mark.parametrize(
    ("name", "text", "code", "command"),
    [
        (
            *("uv-receipt.toml", UV_RECEIPT, "print(extras.hint('plot', 'run'))"),
            "uv tool install --python 3.12 --with 'ziglang>=0.15' 'moepack[run,plot]'",
        ),
        (
            *("uv-receipt.toml", UV_RECEIPT, "print(extras.package_hint('z'))"),
            "uv tool install --python 3.12 --with 'ziglang>=0.15' --with z 'moepack[run]'",
        ),
        (
            *("uv-receipt.toml", "broken", "print(extras.hint('run'))"),
            "uv tool install 'moepack[run]'",
        ),
        (
            *("pipx_metadata.json", "{}", "print(extras.hint('run', 'plot'))"),
            "pipx runpip moepack install 'moepack[run,plot]'",
        ),
        (
            *("pipx_metadata.json", "{}", "print(extras.package_hint('ziglang'))"),
            "pipx runpip moepack install ziglang",
        ),
    ],
)
def test_what_uv_and_pipx_installed_is_added_to_by_them(
    name: str, text: str, code: str, command: str, bare_venv: Path, laid_out: Path
) -> None:
    note = bare_venv / name
    note.write_text(text)
    try:
        assert told(bare_venv, laid_out, code) == command
    finally:
        note.unlink()


def test_an_environment_without_pip_is_added_to_by_uv(
    bare_venv: Path, laid_out: Path, tmp_path: Path
) -> None:
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    python = bare_venv / "bin" / "python"
    hint = "print(extras.hint('plot'))"
    by_uv = told(bare_venv, laid_out, hint, str(tmp_path))
    assert by_uv == f"uv pip install --python {python} 'moepack[plot]'"
    with_pip = told(bare_venv, laid_out, hint, "/nowhere")
    assert with_pip == f"{python} -m ensurepip && {python} -m pip install 'moepack[plot]'"


def test_the_system_s_own_python_is_left_alone(tmp_path: Path, laid_out: Path) -> None:
    """Where pip would refuse (PEP 668): a Python with its note, and a library of links."""
    stdlib = Path(os.__file__).parent
    copy = tmp_path / "lib" / stdlib.name
    copy.mkdir(parents=True)
    for path in stdlib.iterdir():
        if path.name != "site-packages":
            (copy / path.name).symlink_to(path)
    (copy / "EXTERNALLY-MANAGED").write_text("[externally-managed]\n")
    names = {"PYTHONHOME": str(tmp_path), "PYTHONPATH": str(laid_out), "PATH": "/bin"}
    code = "from moepack import extras; print(extras.hint('run'))"
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    end = subprocess.run([base, "-P", "-c", code], env=names, stdout=subprocess.PIPE, text=True)
    words = f"{base} -m venv ~/.venvs/moepack && ~/.venvs/moepack/bin/pip install 'moepack[run]'"
    assert end.stdout.strip() == words


def test_all_that_is_missing_is_named_at_once(bare_venv: Path, laid_out: Path) -> None:
    code = (
        "exec('try: extras.require(\\'run\\', \\'record\\', \\'plot\\')\\n'"
        "'except Exception as e: print(e); print(e.hint)')"
    )
    problem, hint = told(bare_venv, laid_out, code).splitlines()
    names = ("prompt_toolkit", "xllamacpp", "matplotlib")
    assert problem == " and ".join(f"{name} is not installed" for name in names)
    assert hint.endswith("'moepack[run,record,plot]'")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("run", ("run", "MODEL", "-p", "hi", "--raw")),
        ("run", ("serve", "MODEL", "--port", "0")),
        ("run", ("bench", "MODEL", "--run")),
        ("record", ("trace", "record", "--model", "PACK", "--prompts", "PROMPTS", "-o", "NEW")),
    ],
)
def test_a_command_asks_once_and_before_it_works(
    extra: str, words: tuple[str, ...], bare_venv: Path, tmp_path: Path
) -> None:
    """Where all is installed that moepack needs, but no llama.cpp."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(pytest.__file__).parent.parent.iterdir():
        if (
            not path.name.startswith(("xllamacpp", "prompt_toolkit", "__"))
            and path.suffix != ".pth"
        ):
            (packages / path.name).symlink_to(path)
    new = tmp_path / "x.moetrace"
    names: dict[str, str | Path] = {
        "MODEL": first_shard("qwen3moe"),
        "PROMPTS": __file__,
        "NEW": new,
    }
    if "PACK" in words:
        names["PACK"] = tmp_path / "pack"
        pack_model([first_shard("qwen3moe")], tmp_path / "pack")
    command: list[str | Path] = [bare_venv / "bin" / "python", "-P", "-m", "moepack"]
    end = subprocess.run(
        [*command, *(names.get(word, word) for word in words)],
        env={"PYTHONPATH": f"{ROOT}:{packages}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    problem, hint = (line for line in end.stderr.splitlines() if not line.startswith("note: "))
    assert (end.returncode, end.stdout) == (6, "")
    lacks = ["xllamacpp"] if extra == "record" else ["prompt_toolkit", "xllamacpp"]
    assert problem == "error: " + " and ".join(f"{name} is not installed" for name in lacks)
    assert hint.endswith(f" install -e {shlex.quote(f'{ROOT}[{extra}]')}")
    assert not (tmp_path / "x.moetrace").exists()


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = dict(project["optional-dependencies"])
    del stated["dev"]
    assert set(stated) == set(extras.PACKAGES)
    for extra, packages in extras.PACKAGES.items():
        for (name, version), requirement in zip(packages, stated[extra], strict=True):
            assert re.match(r"[\w-]+", requirement)[0] == name  # type: ignore[index]
            assert version is None or requirement == f"{name}=={version}"


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
