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
from itertools import chain
from pathlib import Path

import pytest
import xxhash

from moepack.common import extras
from tests.support.children import run_command
from tests.support.models import first_shard, pack_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HINT = "print(extras.hint('plot'))"


def told(python: Path | str, packages: object, code: str, *options: str, **names: str) -> str:
    """Print what moepack in the folders `packages` says; `names` are more of the environment."""
    command = [str(python), *options, "-P", "-c", f"from moepack.common import extras; {code}"]
    environment = {"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin", **names}
    end = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return end.stdout.strip()


def run(python: Path | str, folder: Path, **names: str) -> list[str]:
    """Print the hint as moepack in `folder` gives it; return it as a shell would read it."""
    requirements = Path(pytest.__file__).parent.parent
    return shlex.split(told(python, f"{folder}:{requirements}", HINT, "-S", **names))


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
    copy = copied(folder / "copy", "moepack", "layouts", "include", "examples", *project)
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


UV_RECEIPT = """
[tool]
requirements = [
    { name = "moepack", extras = ["run"], path = "/x/moepack.whl" },
    { name = "ziglang", specifier = ">=0.15" },
]
python = "3.12"
"""
UV = "uv tool install --python 3.12 --with 'ziglang>=0.15'"
PIPX = "pipx runpip moepack install"


@pytest.mark.parametrize(
    ("text", "hint", "package_hint"),
    [
        (UV_RECEIPT, f"{UV} 'moepack[run,plot]'", f"{UV} --with z 'moepack[run]'"),
        ("broken", "uv tool install 'moepack[plot,run]'", "uv tool install --with z moepack"),
        ("{}", f"{PIPX} 'moepack[plot,run]'", f"{PIPX} z"),
    ],
)
def test_what_uv_and_pipx_installed_is_added_to_by_them(
    text: str, hint: str, package_hint: str, bare_venv: Path, laid_out: Path
) -> None:
    note = bare_venv / ("pipx_metadata.json" if text == "{}" else "uv-receipt.toml")
    note.write_text(text)
    code = "print(extras.hint('plot', 'run'), extras.package_hint('z'), sep='\\n')"
    try:
        assert told(bare_venv / "bin" / "python", laid_out, code).splitlines() == [
            hint,
            package_hint,
        ]
    finally:
        note.unlink()


def test_an_environment_without_pip_is_added_to_by_uv(
    bare_venv: Path, laid_out: Path, tmp_path: Path
) -> None:
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    python = bare_venv / "bin" / "python"
    by_uv = told(python, laid_out, HINT, PATH=str(tmp_path))
    assert by_uv == f"uv pip install --python {python} 'moepack[plot]'"
    with_pip = told(python, laid_out, HINT, PATH="/nowhere")
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
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    words = f"{base} -m venv ~/.venvs/moepack && ~/.venvs/moepack/bin/pip install 'moepack[plot]'"
    assert told(base, laid_out, HINT, PYTHONHOME=str(tmp_path)) == words


def test_all_that_is_missing_is_named_at_once(bare_venv: Path, laid_out: Path) -> None:
    code = (
        "exec('try: extras.require(\\'run\\', \\'plot\\')\\n'"
        "'except Exception as e: print(e); print(e.hint)')"
    )
    problem, hint = told(bare_venv / "bin" / "python", laid_out, code).splitlines()
    names = ("h11", "prompt_toolkit", "xllamacpp", "matplotlib")
    assert problem == " and ".join(f"{name} is not installed" for name in names)
    assert hint.endswith("'moepack[run,plot]'")


MODEL = str(first_shard("qwen3moe"))
COMMANDS = {
    f"run {MODEL} -p hi --raw": ["run"],
    f"serve {MODEL} --port 0": ["run"],
    "run hf://OWNER/NAME/Q4_K_M": ["run", "remote"],
    "serve http://localhost:1/model.moepack": ["run", "remote"],
    f"bench {MODEL} --run": ["run"],
    "trace record --model PACK --prompts PROMPTS -o NEW": ["run"],
}
"""Commands, with the extras that each needs."""
PACKAGES = {
    "remote": ["huggingface_hub", "obstore"],
    "run": ["prompt_toolkit", "xllamacpp"],
}
EACH_COMMAND = """
import sys
from moepack.__main__ import main

for words in sys.argv[1:]:
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as end:
        print(end.code, file=sys.stderr, flush=True)
"""


def test_a_command_asks_once_and_before_it_works(bare_venv: Path, tmp_path: Path) -> None:
    """Where all is installed that moepack needs, but no llama.cpp, and nothing for addresses."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(pytest.__file__).parent.parent.iterdir():
        is_left_out = path.name.startswith(("__", *chain.from_iterable(PACKAGES.values())))
        if not is_left_out and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    pack_model([Path(MODEL)], tmp_path / "PACK")
    (tmp_path / "PROMPTS").write_text("Hello\n")
    names = {"PYTHONPATH": f"{ROOT}:{packages}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    program = (bare_venv / "bin" / "python", "-P", "-c", EACH_COMMAND, *COMMANDS)
    end = run_command(*program, env=names, cwd=tmp_path)
    lines = iter(line for line in end.stderr.splitlines() if not line.startswith("note: "))
    for needed in COMMANDS.values():
        lacks = [package for extra in needed for package in PACKAGES[extra]]
        assert next(lines) == "error: " + " and ".join(f"{name} is not installed" for name in lacks)
        requirement = shlex.quote(f"{ROOT}[{','.join(needed)}]")
        assert next(lines).endswith(f" install -e {requirement}")
        assert next(lines) == "6"
    assert (list(lines), end.stdout) == ([], "")
    assert not (tmp_path / "NEW").exists()


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = dict(project["optional-dependencies"])
    del declared["dev"]
    assert set(declared) == set(extras.PACKAGES)
    for extra, packages in extras.PACKAGES.items():
        for (name, version), requirement in zip(packages, declared[extra], strict=True):
            assert re.match(r"[\w-]+", requirement)[0] == name  # type: ignore[index]
            assert version is None or requirement == f"{name}=={version}"


@pytest.mark.slow
def test_pip_is_named_as_it_is_found_where_it_is_that_of_this_python(
    tmp_path: Path, laid_out: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    ours = run(programs / "python", laid_out, PATH=f"{programs}:/bin")
    assert ours == ["pip", "install", "moepack[plot]"]
    others = run(programs / "python", laid_out)
    assert others[:3] == [str(programs / "python"), "-m", "pip"]


def test_the_hint_of_a_folder_that_was_installed_works(home: Path) -> None:
    """What pip was given, and took, is what the hint gives it again."""
    hint = told(home / "bin" / "python", "", HINT)
    assert shlex.split(hint)[-1] == f"{home.parent / 'copy'}[plot]"


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
    end = subprocess.run(where, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    package = Path(end.stdout.strip()).parent
    assert package.is_relative_to(home)
    assert (package / "py.typed").exists()
