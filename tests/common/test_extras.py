"""What adds an extra, in processes that see an installation."""

import re
import shlex
import subprocess
import tomllib
import venv
from itertools import chain
from pathlib import Path

import pytest

from moepack.common import extras
from tests.support.children import run_command
from tests.support.models import first_shard, pack_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def told(python: Path | str, packages: object, code: str, *options: str, **names: str) -> str:
    """Print what moepack in the folders `packages` says; `names` are more of the environment."""
    command = [str(python), *options, "-P", "-c", f"from moepack.common import extras; {code}"]
    environment = {"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin", **names}
    end = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return end.stdout.strip()


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment without pip, as uv does, and pipx by it."""
    folder = tmp_path_factory.mktemp("environments") / "moepack"
    venv.create(folder, with_pip=False)
    return folder


def test_an_environment_without_pip_is_added_to_by_uv(bare_venv: Path) -> None:
    python = bare_venv / "bin" / "python"
    code = "print(extras.hint('plot', 'run'), extras.package_hint('z>1'), sep='\\n')"
    assert told(python, ROOT, code).splitlines() == [
        f"uv pip install --python {python} -e '{ROOT}[plot,run]'",
        f"uv pip install --python {python} 'z>1'",
    ]


def test_all_that_is_missing_is_named_at_once(bare_venv: Path) -> None:
    code = (
        "exec('try: extras.require(\\'run\\', \\'plot\\')\\n'"
        "'except Exception as e: print(e); print(e.hint)')"
    )
    problem, hint = told(bare_venv / "bin" / "python", ROOT, code).splitlines()
    names = ("h11", "prompt_toolkit", "xllamacpp", "matplotlib")
    assert problem == " and ".join(f"{name} is not installed" for name in names)
    assert shlex.split(hint)[-1] == f"{ROOT}[run,plot]"


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
PACKAGES = {"remote": ["huggingface_hub", "obstore"], "run": ["prompt_toolkit", "xllamacpp"]}
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


def packages_without(folder: Path, *names: str) -> Path:
    """Make a folder with the packages of this Python but those whose names begin so."""
    folder.mkdir()
    for path in Path(pytest.__file__).parent.parent.iterdir():
        if not path.name.startswith(("__", *names)) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


def test_a_command_asks_once_and_before_it_works(bare_venv: Path, tmp_path: Path) -> None:
    """Where all is installed that moepack needs, but no llama.cpp, and nothing for addresses."""
    packages = packages_without(tmp_path / "packages", *chain.from_iterable(PACKAGES.values()))
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


def test_a_llama_server_of_ones_own_needs_no_other_llama_cpp(
    bare_venv: Path, tmp_path: Path
) -> None:
    packages = packages_without(tmp_path / "packages", "xllamacpp")
    names = {"PYTHONPATH": f"{ROOT}:{packages}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    options = "--no-learn --server /bin/false"
    commands = (f"serve {MODEL} --port 0 {options}", f"run {MODEL} -p hi --raw {options}")
    end = run_command(bare_venv / "bin" / "python", "-P", "-c", EACH_COMMAND, *commands, env=names)
    assert end.stderr.count("/bin/false: ended with code 1") == 2, end.stderr
    assert "not installed" not in end.stderr


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = dict(project["optional-dependencies"])
    del declared["dev"]
    assert set(declared) == set(extras.PACKAGES)
    for extra, packages in extras.PACKAGES.items():
        for (name, version), requirement in zip(packages, declared[extra], strict=True):
            assert re.match(r"[\w-]+", requirement)[0] == name  # type: ignore[index]
            assert version is None or requirement == f"{name}=={version}"
