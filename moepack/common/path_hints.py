"""Hints for a missing path: a name in a hub, another spelling, a download."""

import os
import re
from pathlib import Path

from moepack.common.escaping import shell_word

_SCHEMES = re.compile(r"(?:hf|huggingface|https?|ollama|ms|modelscope)(?::/+|:)", re.IGNORECASE)
_HUB = re.compile(
    r"(?:(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/|(?:hf|huggingface):/*)?"
    r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+?)(?:\.git)?"
    r"(?::(?P<type>[\w-]+)|/(?:resolve|blob|tree)/(?P<revision>[\w.-]+)(?:/(?P<file>[\w./-]+))?"
    r"|/(?P<inner>[\w./-]+\.gguf))?/?(?:[?#].*)?\Z"
)
_OLLAMA = re.compile(r"(?:ollama:/*)?(?P<name>[a-z0-9._-]+(?:/[a-z0-9._-]+)?:[\w.-]+)\Z")
_WINDOWS = re.compile(r"(?P<drive>[A-Za-z]):[\\/](?P<rest>.*)\Z", re.DOTALL)
_QUOTES = "\"'\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb`"
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"
"""Dashes that pages have in place of hyphens."""
_MAX_NAMES = 4096
_SHOWN_NAMES = 5
_FIRST_SHARD = re.compile(r"(?<!-of-\d{5})\.gguf\Z|-00001-of-\d{5}\.gguf\Z|\.moepack\Z")

HUB_RUN = "moepack run hf://OWNER/NAME/Q4_K_M"
"""The command that fetches a model from the hub, and runs it."""


def missing_hint(path: str | os.PathLike[str]) -> str | None:
    """Return the hint for a missing path; None if there is none."""
    text = os.fspath(path)
    if not text.strip():
        return "the name is empty: is a shell variable unset?"
    return _misspelt(text) or download_hint(text) or _near(text)


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
        return f"here are {shown}{more}; others come from the hub: {HUB_RUN}"
    return f"from the hub: {HUB_RUN}"


def download_hint(name: str) -> str | None:
    """Return how to get a model named by its hub or address; None for other names.

    A path of two words is a repository's only if its folder is not here.
    """
    if (ollama := _ollama(name)) is not None:
        return (
            f"ollama's models are files as well: `ollama show {ollama['name']} --modelfile`"
            " prints the path behind FROM"
        )
    if (address := hub_address(name)) is not None:
        return f"on the hub: moepack run {shell_word(address)}"
    if re.match(r"https?:/", name):
        address = re.sub(r"\A(https?):/+", r"\1://", name)
        return f"download it first: curl -L -O {shell_word(address)}"
    return None


def _ollama(name: str) -> re.Match[str] | None:
    """Return the match of a name of ollama's; None if it may be one of the hub's."""
    match = _OLLAMA.match(name)
    return match if name.startswith("ollama") or not _looks_like_type(name) else None


def _looks_like_type(name: str) -> bool:
    """Return whether a type of quantisation follows the colon, as in the hub."""
    word = name.rpartition(":")[2]
    return "/" in name and bool(re.match(r"(?:UD-)?I?Q\d|BF16|F16|F32|MXFP4", word, re.IGNORECASE))


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
    if hub is None or not _is_remote(name, hub) or _ollama(name) is not None:
        return None
    revision = f"@{hub['revision']}" if hub["revision"] not in (None, "main") else ""
    inner = hub["file"] or hub["inner"] or hub["type"]
    return f"hf://{hub['owner']}/{hub['name']}{revision}" + (f"/{inner}" if inner else "")


def _misspelt(text: str) -> str | None:
    """Return the hint for a path that a shell or a page has changed, or has not."""
    plain = text.strip().strip(_QUOTES).strip()
    if plain != text and plain:
        there = "" if os.path.exists(plain) else ", without the quotes or spaces around it"
        return f"name it {shell_word(plain)}{there}"
    if text[0] in _DASHES:
        return f"options begin with hyphens: --{text.strip(_DASHES)}"
    if text.startswith("~"):
        expanded = os.path.expanduser(text)
        return f"~ is expanded by the shell only at the start of a word: {shell_word(expanded)}"
    if windows := _WINDOWS.match(text):
        rest = windows["rest"].replace("\\", "/")
        under = f"/mnt/{windows['drive'].lower()}/{rest}"
        return f"a Windows path, in WSL: {shell_word(under)}"
    if variable := re.match(r"\$\{?(\w+)\}?", text):
        return f'the shell has not put in the value of {variable[1]}: quote it with " or not at all'
    if any(character in text for character in "*?[") and " " not in text:
        return "no file fits this pattern: see with ls which files are here"
    if len(text.split()) > 2 and "/" not in text:
        return f"a file is expected here: printf '%s\\n' {shell_word(text)} > prompts.txt"
    return None


def _near(text: str) -> str | None:
    """Return the name in the same folder that is spelt most like this one."""
    from difflib import get_close_matches

    folder, name = os.path.split(text.rstrip("/"))
    if "://" in text:
        return None
    try:
        names = os.listdir(folder or ".")[:_MAX_NAMES]
    except OSError:
        parent = _first_missing(text)
        return f"there is no folder {shell_word(parent)}" if parent else None
    stem, ending = os.path.splitext(name)
    in_small = {one.lower(): one for one in names}
    stems = {os.path.splitext(one)[0]: one for one in in_small if one.endswith(ending.lower())}
    alike = [stems[one] for one in get_close_matches(stem.lower(), stems, 1, 0.7)]
    near = [in_small[one] for one in alike or get_close_matches(name.lower(), in_small, 1, 0.85)]
    return f"did you mean {shell_word(os.path.join(folder, near[0]))}?" if near else None


def _first_missing(text: str) -> str | None:
    """Return the first folder on the way to a path that is not there."""
    folders = [str(parent) for parent in reversed(Path(text).parents)]
    return next((folder for folder in folders if not os.path.isdir(folder)), None)
