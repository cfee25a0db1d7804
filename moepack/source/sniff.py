"""Say what a file is that is not a GGUF, and what to do about it."""

import os
import re

_PART_NAME = re.compile(r"\.gguf[.-](part|split)[-.]?\w+\Z|\.part\d+of\d+\Z", re.IGNORECASE)

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
    if start[:2] == b"PK" or start[:2] == b"\x1f\x8b" or start[:4] == b"\x28\xb5\x2f\xfd":
        return "a compressed archive, not a GGUF", "unpack it first"
    if len(start) > 9 and start[8:9] == b"{":
        return "a safetensors file, not a GGUF", "convert it with llama.cpp's convert_hf_to_gguf.py"
    if not start.strip(b"\0"):
        return "zeros, not a GGUF", "the download did not finish: download it again"
    return "not a GGUF", None
