"""Extras: what some commands need beyond moepack, and how it is added."""

import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from moepack.errors import MachineError

LLAMA_CPP = ("xllamacpp", "2026.10.11549")
"""The package that brings llama.cpp, and the version whose structures are known here."""

PACKAGES: Mapping[str, Sequence[tuple[str, str | None]]] = MappingProxyType(
    {
        "gpu": [("nvidia-ml-py", None)],
        "mount": [("mfusepy", None)],
        "plot": [("matplotlib", None)],
        "record": [LLAMA_CPP],
        "run": [("prompt_toolkit", None), LLAMA_CPP],
    }
)
"""The packages of each extra, with the version where only one will do."""

_CHECKOUT = Path(__file__).resolve().parent.parent
_RECEIPT = "uv-receipt.toml"
_PIPX = "pipx_metadata.json"


def require(*extras: str) -> None:
    """Raise MachineError where extras are missing: all of them in one message, and one command."""
    missing = {extra: problems for extra in extras if (problems := _problems(extra))}
    if missing:
        distinct = dict.fromkeys(problem for each in missing.values() for problem in each)
        raise MachineError(" and ".join(distinct), hint=hint(*missing))


def _problems(extra: str) -> list[str]:
    """Return what is wrong with the packages of an extra."""
    problems = (_problem(name, version) for name, version in PACKAGES[extra])
    return [problem for problem in problems if problem is not None]


def _problem(name: str, version: str | None) -> str | None:
    """Return what is wrong with a package; None if it is there."""
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed"
    if version is not None and found != version:
        return f"{name} is installed in another version: {found}, not {version}"
    return None


def hint(*extras: str) -> str:
    """Return the command that adds extras (`plot`, `record`) to moepack as it was installed.

    A checkout stays one; what came from a folder, a file or a repository comes from there again,
    by pip, uv or pipx, whichever it was.
    """
    return _installer().command(extras, ())


def package_hint(*packages: str) -> str:
    """Return the command that adds packages of others to the Python that moepack runs in."""
    return _installer().command((), packages)


class _Installer(NamedTuple):
    """What moepack was installed by: the words before a requirement, and what it has already.

    Where `is_new` is true it makes the whole environment from what it is told: then moepack, its
    extras and other packages are named again, these behind the words in `beside`.
    """

    words: str
    is_new: bool = False
    beside: str = ""
    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def command(self, extras: Sequence[str], packages: Sequence[str]) -> str:
        all_extras = tuple(dict.fromkeys((*self.extras, *extras)))
        others = [self.beside + shlex.quote(one) for one in (*self.packages, *packages)]
        is_named = self.is_new or bool(extras)
        return " ".join([self.words, *others, *[_requirement(all_extras)] * is_named])


def _installer() -> _Installer:
    prefix = Path(sys.prefix)
    if (prefix / _RECEIPT).exists():
        return _uv_tool(prefix / _RECEIPT)
    if (prefix / _PIPX).exists():
        return _Installer(f"pipx runpip {shlex.quote(prefix.name)} install")
    python = shlex.quote(sys.executable)
    if _is_managed():
        folder = "~/.venvs/moepack"
        words = f"{python} -m venv {folder} && {folder}/bin/pip install"
        return _Installer(words, is_new=True)
    if util.find_spec("pip") is not None:
        return _Installer(f"{_pip(python)} install")
    if shutil.which("uv"):
        return _Installer(f"uv pip install --python {python}")
    return _Installer(f"{python} -m ensurepip && {python} -m pip install")


def _pip(python: str) -> str:
    """Return what runs pip for the Python that runs this: another one's may come first."""
    found = shutil.which("pip")
    is_ours = found is not None and os.path.dirname(found) == os.path.dirname(sys.executable)
    return "pip" if is_ours else f"{python} -m pip"


def _uv_tool(receipt: Path) -> _Installer:
    """Return uv's tools, with what the receipt of this one says that was asked for."""
    import tomllib

    try:
        tool = tomllib.loads(receipt.read_text()).get("tool", {})
        requirements: list[dict[str, Any]] = list(tool.get("requirements", []))
        extras = tuple(e for one in requirements[:1] for e in one.get("extras", ()))
        others = tuple(f"{one['name']}{one.get('specifier', '')}" for one in requirements[1:])
        python = f" --python {shlex.quote(tool['python'])}" if tool.get("python") else ""
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        extras, others, python = (), (), ""
    return _Installer(f"uv tool install{python}", True, "--with ", extras, others)


def _is_managed() -> bool:
    """Return whether this Python is the system's, where pip refuses to install (PEP 668)."""
    if sys.prefix != sys.base_prefix:
        return False
    return (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").exists()


def _requirement(extras: Sequence[str]) -> str:
    """Return what is to be installed, quoted: brackets mean something to shells."""
    names = f"[{','.join(extras)}]" if extras else ""
    if (_CHECKOUT / "pyproject.toml").exists():
        return f"-e {shlex.quote(f'{_CHECKOUT}{names}')}"
    origin = _origin()
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        return shlex.quote(f"{unquote(urlsplit(url).path)}{names}")
    vcs = origin.get("vcs_info", {})
    if vcs:
        url = f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return shlex.quote(f"moepack{names} @ {url}" if url else f"moepack{names}")


def _origin() -> dict[str, Any]:
    """Return what pip noted of a package that came from no index (PEP 610); nothing otherwise."""
    try:
        text = metadata.distribution("moepack").read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
