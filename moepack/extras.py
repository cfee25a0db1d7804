"""Extras: what some commands need beyond moepack, and how it is added."""

import json
import os
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_CHECKOUT = Path(__file__).resolve().parent.parent


def hint(extra: str) -> str:
    """Return the command that adds an extra (`plot`, `record`) to moepack as it was installed.

    A checkout stays one; what came from a folder, a file or a repository comes from there again.
    """
    return f"{pip_command()} install {_requirement(extra)}"


def pip_command() -> str:
    """Return what runs pip for the Python that runs this: another one's may come first."""
    found = shutil.which("pip")
    is_ours = found is not None and os.path.dirname(found) == os.path.dirname(sys.executable)
    return "pip" if is_ours else f"{shlex.quote(sys.executable)} -m pip"


def _requirement(extra: str) -> str:
    """Return what pip is to install, quoted: brackets mean something to shells."""
    if (_CHECKOUT / "pyproject.toml").exists():
        return f"-e {shlex.quote(f'{_CHECKOUT}[{extra}]')}"
    origin = _origin()
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        return shlex.quote(f"{unquote(urlsplit(url).path)}[{extra}]")
    vcs = origin.get("vcs_info", {})
    if vcs:
        url = f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return shlex.quote(f"moepack[{extra}] @ {url}" if url else f"moepack[{extra}]")


def _origin() -> dict[str, Any]:
    """Return what pip noted of a package that came from no index (PEP 610); nothing otherwise."""
    try:
        text = metadata.distribution("moepack").read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
