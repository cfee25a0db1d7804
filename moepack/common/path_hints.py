"""Hints for a missing path: a model on the hub, a name like it, the models that are here."""

import os
import re
from pathlib import Path
from urllib.parse import unquote

from moepack.common.escaping import shell_word

_SCHEMES = re.compile(r"(?:hf|huggingface|https?)(?::/+|:)", re.IGNORECASE)
_HUB = re.compile(
    r"(?:(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/|(?:hf|huggingface):/*)?"
    r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+?)(?:\.git)?"
    r"(?::(?:latest|(?P<type>[\w-]+))|/(?:resolve|blob|tree)/(?P<revision>[\w.-]+)(?:/(?P<file>[\w./-]+))?"
    r"|/(?P<inner>[\w./-]+\.gguf))?/?(?:\?show_file_info=(?P<shown>[^&#]+).*|[?#].*)?\Z"
)
_HUB_RUN = "moepack run hf://OWNER/NAME/Q4_K_M"
_MAX_NAMES = 4096
_SHOWN_NAMES = 5
_FIRST_SHARD = re.compile(r"(?<!-of-\d{5})\.gguf\Z|-00001-of-\d{5}\.gguf\Z|\.moepack\Z")


def missing_hint(path: str | os.PathLike[str]) -> str | None:
    """Return the hint for a missing path; None if there is none."""
    text = os.fspath(path)
    if not text.strip():
        return "the name is empty: is a shell variable unset?"
    address = hub_address(text)
    return _near(text) if address is None else f"on the hub: moepack run {shell_word(address)}"


def missing_model_hint(path: str | os.PathLike[str]) -> str:
    """Return the hint for a missing model: a name like it, the models here, the hub."""
    hint = missing_hint(path)
    if hint is not None:
        return hint
    folder = os.path.dirname(os.fspath(path)) or os.curdir
    try:
        here = sorted(name for name in os.listdir(folder) if _FIRST_SHARD.search(name))
    except OSError:
        here = []
    if here:
        shown = ", ".join(shell_word(name) for name in here[:_SHOWN_NAMES])
        more = ", …" * (len(here) > _SHOWN_NAMES)
        return f"here are {shown}{more}; others come from the hub: {_HUB_RUN}"
    return f"from the hub: {_HUB_RUN}"


def _is_remote(name: str, hub: re.Match[str]) -> bool:
    if _SCHEMES.match(name) or re.match(r"(?:huggingface|hf)\.co/", name):
        return True
    if hub["owner"] in (".", "..") or os.path.isdir(hub["owner"]):
        return False
    return hub["inner"] is None and not re.search(r"\.(gguf|moepack|\w{2,5})\Z", name.lower())


def hub_address(name: str) -> str | None:
    """Return the `hf://` address of a model that is named as elsewhere; None for other names.

    Such as `OWNER/NAME:Q4_K_M`, `hf.co/OWNER/NAME`, and the address of a page of the hub.
    """
    hub = _HUB.match(name)
    if hub is None or not _is_remote(name, hub):
        return None
    revision = f"@{hub['revision']}" if hub["revision"] not in (None, "main") else ""
    inner = hub["file"] or hub["inner"] or hub["type"] or unquote(hub["shown"] or "")
    return f"hf://{hub['owner']}/{hub['name']}{revision}" + (f"/{inner}" if inner else "")


def _near(text: str) -> str | None:
    """Return the name in the same folder that is spelt most like this one."""
    from difflib import get_close_matches

    folder, name = os.path.split(text.rstrip("/"))
    if "://" in text:
        return None
    try:
        names = os.listdir(folder or ".")[:_MAX_NAMES]
    except OSError:
        parents = (str(parent) for parent in reversed(Path(text).parents))
        missing = next((parent for parent in parents if not os.path.isdir(parent)), None)
        return f"there is no folder {shell_word(missing)}" if missing else None
    stem, ending = os.path.splitext(name)
    in_small = {one.lower(): one for one in names}
    stems = {os.path.splitext(one)[0]: one for one in in_small if one.endswith(ending.lower())}
    alike = [stems[one] for one in get_close_matches(stem.lower(), stems, 1, 0.7)]
    near = [in_small[one] for one in alike or get_close_matches(name.lower(), in_small, 1, 0.85)]
    return f"did you mean {shell_word(os.path.join(folder, near[0]))}?" if near else None
