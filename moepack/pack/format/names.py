"""Names in a pack: of its files, and of the parts that a blob consists of."""

import re

from moepack.common.errors import PackError
from moepack.common.pack_files import JOURNAL_NAME, MANIFEST_NAME

MIRROR_NAME = ".mirror"
"""The link in a pack's directory to its mirror; no data file may have such a name."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._-]+\Z", re.ASCII)
_MANIFEST_NAMES = {MANIFEST_NAME, f"{MANIFEST_NAME}.tmp", JOURNAL_NAME}
_DEVICES = {"con", "prn", "aux", "nul"}
_DEVICES |= {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}
"""Names of devices on Windows, with any suffix."""


def is_plain_name(name: str) -> bool:
    """Return whether `name` may name a data file, on every system: see FORMAT.md."""
    return is_index_name(name) and name.lower() != "index.bin"


def is_index_name(name: str) -> bool:
    """Return whether `name` may name the index, which may be called `index.bin`."""
    lower = name.lower()
    return (
        bool(_FILE_NAME.match(name))
        and not name.endswith(".")
        and lower not in _MANIFEST_NAMES
        and lower.partition(".")[0] not in _DEVICES
    )


def padded_text(field: bytes, path: str, place: str) -> str:
    """Read a text that is padded with zeros; raise PackError."""
    text, _, padding = field.partition(b"\0")
    if not text:
        raise PackError("an empty name", path=path, place=place)
    if len(text) == len(field) or any(padding):
        problem = "a name is not padded with zeros"
        raise PackError(problem, path=path, place=place, found=field)
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise PackError("a name is not UTF-8", path=path, place=place, found=text) from None


def padded_name(field: bytes, path: str, place: str) -> str:
    """Read the name of a section, family, part or type, padded with zeros; raise PackError."""
    name = padded_text(field, path, place)
    if not _NAME.match(name):
        expected = "letters, digits, '.', '_', '-'"
        raise PackError("not a name", path=path, place=place, expected=expected, found=repr(name))
    return name


def projection(part: str) -> str:
    """Return the projection of a part: `up` for `ffn_up_exps.weight` and `ffn_up_exps.bias`."""
    stem = part.partition(".")[0]
    return stem.removeprefix("ffn_").removesuffix("_exps").removesuffix("_chexps")


def short_name(part: str) -> str:
    """Return the short name of a part: `up` for the weight, `up.bias` for the bias."""
    suffix = part.partition(".")[2]
    return projection(part) if suffix == "weight" else f"{projection(part)}.{suffix}"
