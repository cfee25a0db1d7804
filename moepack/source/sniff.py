"""Descriptions of files that are no GGUFs, and hints for them."""

import os
import re
from pathlib import Path

from moepack.common.escaping import shell_word
from moepack.common.pack_files import is_in_pack
from moepack.common.paths import AnyPath

_PART_NAME = re.compile(r"\.gguf[.-](part|split)[-.]?\w+\Z|\.part\d+of\d+\Z", re.IGNORECASE)

_UNFINISHED_NAME = re.compile(
    r"\.(part|partial|incomplete|crdownload|download|opdownload|tmp|!ut|!qB|aria2)\Z", re.IGNORECASE
)
_JOIN_HINT = "join the parts first: cat model.gguf.part* > model.gguf, in order"
_MODEL_HINT = "a model is a file that ends in .gguf, a folder of such files, or a pack"
_PAGE = ("a web page, not a GGUF", "this is an error or login page: download the file again")
_ARCHIVE = "a compressed archive, not a GGUF"
_SAFETENSORS_HINT = "convert it with llama.cpp's convert_hf_to_gguf.py"
_LFS_HINT = "fetch the file itself: git lfs pull, or download it again"
_STARTS = {
    b"version https://git-lfs": ("a Git LFS pointer, not the file it points to", _LFS_HINT),
    **dict.fromkeys((b"<!doctype", b"<html", b"<head", b"<?xml"), _PAGE),
    b"pk\x03\x04": (_ARCHIVE, "unpack it first: unzip {}"),
    b"\x1f\x8b": (_ARCHIVE, "unpack it first: gunzip {}"),
    b"\x28\xb5\x2f\xfd": (_ARCHIVE, "unpack it first: unzstd {}"),
    b"moetrace": ("a trace of a model, not a model", _MODEL_HINT),
}
"""Descriptions and hints by the first bytes, in small letters; `{}` is the path."""


def is_raw_part(path: AnyPath) -> bool:
    """Return whether a file is named as a piece of a GGUF cut by bytes, as `.gguf.part1of3`."""
    return bool(_PART_NAME.search(os.fspath(path)))


def join_hint(path: AnyPath) -> str | None:
    """Return the hint for a piece cut by bytes; None for other names."""
    return _JOIN_HINT if is_raw_part(path) else None


def describe(path: AnyPath, start: bytes) -> tuple[str, str | None]:
    """Return the description of a file by its first bytes, and a hint if there is one."""
    if is_raw_part(path):
        return "a piece of a GGUF that was cut by bytes, not a GGUF", _JOIN_HINT
    if is_in_pack(Path(path)):
        folder = os.path.dirname(os.fspath(path)) or os.curdir
        return "a file of a pack, not a GGUF", f"name the pack: {shell_word(folder)}"
    if not start:
        return "an empty file", "download it again"
    if b"GGUF".startswith(start):
        return "a GGUF cut short", "the download did not finish: download it again"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for first, (description, hint) in _STARTS.items():
        if text.startswith(first):
            return description, hint.format(shell_word(os.fspath(path)))
    if len(start) > 9 and start[8:9] == b"{":
        return "a safetensors file, not a GGUF", _SAFETENSORS_HINT
    if not start.strip(b"\0"):
        return "zeros, not a GGUF", "the download did not finish: download it again"
    return "not a GGUF", _MODEL_HINT


def unfinished(path: AnyPath) -> tuple[str, str] | None:
    """Return the sign of an unfinished download, a file's name, and a hint; None for other files.

    A program that downloads names the file otherwise until it is whole, or notes the missing pieces
    beside it: then the file may have its full length, and zeros in it.
    """
    name = os.fspath(path)
    if os.path.exists(note := f"{name}.aria2"):
        hint = "go on with it: aria2c -c ADDRESS; where it is whole, remove that file"
        return note, f"{hint}: rm {shell_word(note)}"
    match = _UNFINISHED_NAME.search(name)
    if match is None or is_raw_part(name):
        return None
    whole = name[: match.start()]
    hint = f"finish it; where it is whole: mv {shell_word(name)} {shell_word(whole)}"
    return name, hint
