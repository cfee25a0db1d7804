"""Say what a file is that is not a GGUF, and what to do about it."""

import os
import re
from pathlib import Path

from moepack.escaping import shell_word
from moepack.storage.pack_files import is_in_pack

_PART_NAME = re.compile(r"\.gguf[.-](part|split)[-.]?\w+\Z|\.part\d+of\d+\Z", re.IGNORECASE)

_UNFINISHED_NAME = re.compile(
    r"\.(part|partial|incomplete|crdownload|download|opdownload|tmp|!ut|!qB|aria2)\Z",
    re.IGNORECASE,
)
_ARCHIVES = {b"PK\x03\x04": "unzip", b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd"}
_MODEL_HINT = "a model is a file that ends in .gguf, a folder of such files, or a pack"
_JOIN_HINT = "join the parts first: cat model.gguf.part* > model.gguf, in order"
_LFS_HINT = "fetch the file itself: git lfs pull, or download it again"
_HTML_HINT = "this is an error or login page: download the file again"


def is_raw_part(path: str | os.PathLike[str]) -> bool:
    """Say whether the name is that of a piece of a GGUF cut by bytes, such as `.gguf.part1of3`."""
    return bool(_PART_NAME.search(os.fspath(path)))


def join_hint(path: str | os.PathLike[str]) -> str | None:
    """Return the hint for a piece cut by bytes; None where the name is not one's."""
    return _JOIN_HINT if is_raw_part(path) else None


def describe(path: str | os.PathLike[str], start: bytes) -> tuple[str, str | None]:
    """Say what a file is whose first bytes are `start`, with a hint where there is one."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if is_raw_part(path):
        return "a piece of a GGUF that was cut by bytes, not a GGUF", _JOIN_HINT
    if is_in_pack(Path(path)):
        return "a file of a pack, not a GGUF", f"name the pack: {shell_word(_folder_of(path))}"
    if not start:
        return "an empty file", "download it again"
    if b"GGUF".startswith(start):
        return "a GGUF cut short", "the download did not finish: download it again"
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file it points to", _LFS_HINT
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page, not a GGUF", _HTML_HINT
    if start[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "a GGML file from before GGUF", "convert it with llama.cpp's convert scripts"
    for magic, program in _ARCHIVES.items():
        if start.startswith(magic):
            hint = f"unpack it first: {program} {shell_word(os.fspath(path))}"
            return "a compressed archive, not a GGUF", hint
    if start.startswith(b"MOETRACE"):
        return "a trace of a model, not a model", _MODEL_HINT
    if len(start) > 9 and start[8:9] == b"{":
        return "a safetensors file, not a GGUF", "convert it with llama.cpp's convert_hf_to_gguf.py"
    if not start.strip(b"\0"):
        return "zeros, not a GGUF", "the download did not finish: download it again"
    return "not a GGUF", _MODEL_HINT


def unfinished(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Return what shows that a file is a download that goes on, and what to do; None for others.

    A program that downloads names the file otherwise until it is whole, or notes beside it what is
    missing: then the file may have its full length, and zeros in it.
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


def _folder_of(path: str | os.PathLike[str]) -> str:
    return os.path.dirname(os.fspath(path)) or os.curdir
