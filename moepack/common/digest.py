"""Digests: moepack's hash, and digests as text (FORMAT.md, "Digests").

XXH3-64 with seed 0 finds accidents at the speed of memory. It is no defence against forgery: for
that, compare with the source byte for byte.
"""

import re
from collections.abc import Callable
from mmap import mmap

import xxhash

_TEXT = re.compile(r"xxh3:[0-9a-f]{16}\Z")

xxh3: Callable[[bytes | bytearray | memoryview | mmap], int] = xxhash.xxh3_64_intdigest
"""Return the XXH3-64 of some bytes."""

stream = xxhash.xxh3_64
"""Start a digest that is fed piece by piece with `update` and read with `intdigest`."""


def to_text(digest: int) -> str:
    """Write a digest as the manifest does: `xxh3:` and 16 hexadecimal digits."""
    return f"xxh3:{digest:016x}"


def from_text(text: str) -> int:
    """Read a digest written by `to_text`; raises ValueError on anything else."""
    if not _TEXT.match(text):
        raise ValueError(f"expected xxh3: and 16 hexadecimal digits, found {text[:40]!r}")
    return int(text[5:], 16)
