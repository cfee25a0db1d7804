"""Installed files of moepack, and extras: packages that some commands need, and how to add them."""

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType

from moepack.common.errors import MachineError

LLAMA_CPP = ("xllamacpp", "2026.10.11549")
"""The package that contains llama.cpp, and the supported version."""

PACKAGES: Mapping[str, Sequence[tuple[str, str | None]]] = MappingProxyType(
    {
        "gpu": [("nvidia-ml-py", None)],
        "mount": [("mfusepy", None)],
        "plot": [("matplotlib", None)],
        "remote": [("huggingface_hub", None), ("obstore", None)],
        "report": [("jinja2", None)],
        "run": [("h11", None), ("prompt_toolkit", None), LLAMA_CPP],
    }
)
"""The packages of each extra, with the version where only one will do."""

_PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """Return the folder `name` (`layouts`, `include`): the wheel has it inside the package.

    A checkout has it beside the package. Raises MachineError if there is neither.
    """
    for place in (_PACKAGE / name, _PACKAGE.parent / name):
        if place.is_dir():
            return place
    raise MachineError(f"{name} was not installed", path=_PACKAGE, hint="install moepack again")


def require(*extras: str, needless: Collection[str] = ()) -> None:
    """Raise MachineError if extras are missing: all in one message, with one command.

    Their packages that are `needless` may be missing.
    """
    missing = {extra: problems for extra in extras if (problems := _problems(extra, needless))}
    if missing:
        distinct = dict.fromkeys(problem for each in missing.values() for problem in each)
        raise MachineError(" and ".join(distinct), hint=hint(*missing))


def _problems(extra: str, needless: Collection[str]) -> list[str]:
    problems = []
    for name, version in PACKAGES[extra]:
        if name in needless:
            continue
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed")
            continue
        if version not in (None, installed):
            problems.append(f"{name} is installed in another version: {installed}, not {version}")
    return problems


def hint(*extras: str) -> str:
    """Return the command that adds extras (`plot`, `run`) to this moepack; a checkout stays one.

    Installers take moepack as installed, wherever it came from, and add the packages alone.
    """
    names = f"[{','.join(extras)}]"
    if (_PACKAGE.parent / "pyproject.toml").exists():
        return f"{_installer()} -e {shlex.quote(f'{_PACKAGE.parent}{names}')}"
    return f"{_installer()} {shlex.quote(f'moepack{names}')}"


def package_hint(package: str) -> str:
    """Return the command that adds another package to the Python that moepack runs in."""
    return f"{_installer()} {shlex.quote(package)}"


def _installer() -> str:
    """Return the command that installs packages for this Python: uv's environments have no pip."""
    python = shlex.quote(sys.executable)
    if util.find_spec("pip") is None:
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"
