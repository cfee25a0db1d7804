"""Extras: packages that some commands need beyond moepack, and the command that adds them."""

import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from moepack.common.errors import MachineError

LLAMA_CPP = ("xllamacpp", "2026.10.11549")
"""The package that contains llama.cpp, and the supported version."""

PACKAGES: Mapping[str, Sequence[tuple[str, str | None]]] = MappingProxyType(
    {
        "cluster": [("distributed", None)],
        "gpu": [("nvidia-ml-py", None)],
        "mount": [("mfusepy", None)],
        "plot": [("matplotlib", None)],
        "remote": [("huggingface_hub", None), ("obstore", None)],
        "report": [("jinja2", None), ("matplotlib", None), ("pillow", None)],
        "run": [("h11", None), ("prompt_toolkit", None), LLAMA_CPP],
    }
)
"""The packages of each extra, with the version where only one will do."""

_CHECKOUT = Path(__file__).resolve().parents[2]
_RECEIPT = "uv-receipt.toml"
_PIPX = "pipx_metadata.json"


def require(*extras: str) -> None:
    """Raise MachineError if extras are missing: all in one message, with one command."""
    missing = {extra: problems for extra in extras if (problems := _problems(extra))}
    if missing:
        distinct = dict.fromkeys(problem for each in missing.values() for problem in each)
        raise MachineError(" and ".join(distinct), hint=hint(*missing))


def _problems(extra: str) -> list[str]:
    problems = []
    for name, version in PACKAGES[extra]:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed")
            continue
        if version not in (None, installed):
            problems.append(f"{name} is installed in another version: {installed}, not {version}")
    return problems


def hint(*extras: str) -> str:
    """Return the command that adds extras (`plot`, `record`) to moepack as it was installed.

    A checkout stays one; a folder, a file or a repository is installed from again, by pip, uv or
    pipx, whichever it was.
    """
    return _command(extras, ())


def package_hint(*packages: str) -> str:
    """Return the command that adds other packages to the Python that moepack runs in."""
    return _command((), packages)


def _command(extras: Sequence[str], packages: Sequence[str]) -> str:
    receipt = Path(sys.prefix) / _RECEIPT
    if receipt.exists():
        words, own_extras, own_packages = _read_receipt(receipt)
        extras, packages = [*own_extras, *extras], [*own_packages, *packages]
        is_new, mark = True, "--with "
    else:
        (words, is_new), mark = _installer(), ""
    others = [mark + shlex.quote(package) for package in packages]
    requirements = [_requirement(dict.fromkeys(extras))] if is_new or extras else []
    return " ".join([words, *others, *requirements])


def _read_receipt(receipt: Path) -> tuple[str, list[str], list[str]]:
    """Return the command of uv's tools, and the extras and packages that moepack's receipt lists.

    uv makes the whole environment anew, so these are named again.
    """
    import tomllib

    try:
        tool = tomllib.loads(receipt.read_text()).get("tool", {})
        requirements: list[dict[str, Any]] = list(tool.get("requirements", []))
        extras = [extra for one in requirements[:1] for extra in one.get("extras", ())]
        packages = [f"{one['name']}{one.get('specifier', '')}" for one in requirements[1:]]
        python = f" --python {shlex.quote(tool['python'])}" if tool.get("python") else ""
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return "uv tool install", [], []
    return f"uv tool install{python}", extras, packages


def _installer() -> tuple[str, bool]:
    """Return the command that installs a requirement, and whether into a new environment."""
    prefix, python = Path(sys.prefix), shlex.quote(sys.executable)
    if (prefix / _PIPX).exists():
        return f"pipx runpip {shlex.quote(prefix.name)} install", False
    # The system's own Python, where pip refuses to install (PEP 668).
    mark = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if sys.prefix == sys.base_prefix and mark.exists():
        folder = "~/.venvs/moepack"
        return f"{python} -m venv {folder} && {folder}/bin/pip install", True
    if util.find_spec("pip") is not None:
        pip = shutil.which("pip")  # that of another Python may come first
        is_ours = pip is not None and os.path.dirname(pip) == os.path.dirname(sys.executable)
        return f"{'pip' if is_ours else f'{python} -m pip'} install", False
    if shutil.which("uv"):
        return f"uv pip install --python {python}", False
    return f"{python} -m ensurepip && {python} -m pip install", False


def _requirement(extras: Iterable[str]) -> str:
    """Return moepack as a requirement, quoted: brackets mean something to shells."""
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
    """Return pip's note on a package that came from no index (PEP 610); else an empty one."""
    try:
        text = metadata.distribution("moepack").read_text("direct_url.json")
        origin = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}
