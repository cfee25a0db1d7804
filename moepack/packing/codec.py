"""Which codec parts are stored by, if any: what `--codec` and `parts.codec` of a layout say."""

import re
from typing import NamedTuple

from moepack.errors import RequestError
from moepack.format.records import ZSTD

DEFAULT_LEVEL = 3
MAX_LEVEL = 19
"""Higher ones take gigabytes of memory for little."""

_TEXT = re.compile(rf"{ZSTD}(?::([0-9]{{1,4}}))?\Z", re.ASCII)


class Codec(NamedTuple):
    """A codec and its level; as text `zstd:3`."""

    name: str
    level: int

    def __str__(self) -> str:
        return f"{self.name}:{self.level}"


def parse(text: str, path: str | None = None, place: str | None = None) -> Codec:
    """Read `zstd` or `zstd:LEVEL`; raise RequestError for anything else.

    `path` and `place` say where it stands, if that is in a file.
    """
    match = _TEXT.match(text)
    level = int(match[1] or DEFAULT_LEVEL) if match else 0
    if not 1 <= level <= MAX_LEVEL:
        expected = f"{ZSTD}, or {ZSTD}:1 to {ZSTD}:{MAX_LEVEL}"
        raise RequestError(
            "no such codec", path=path, place=place, expected=expected, found=repr(text[:80])
        )
    return Codec(ZSTD, level)


def is_worth_it(stored_length: int, length: int) -> bool:
    """Return whether a part is stored by a codec that makes it `stored_length` bytes long.

    What is shortened by less than a twentieth is not worth decoding.
    """
    return 20 * stored_length <= 19 * length
