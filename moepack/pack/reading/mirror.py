"""The mirror of a pack: some of its bytes a second time, in a folder on another drive.

    PACK/.mirror                a link to the folder, made last
    folder/mirror.json          which bytes of which pack are there
    folder/experts-00000.bin    named as in the pack, and as long; what is not mirrored is a hole

All of it lies beside the pack's format: the pack is the same with and without it. What makes a
mirror is `moepack.packing.copies.mirror`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from moepack.common import digest, strict_json
from moepack.common.errors import PackError
from moepack.pack.format import manifest
from moepack.pack.format.index import Index
from moepack.pack.format.names import MIRROR_NAME, is_plain_name
from moepack.storage.ranges import Ranges, read_ranges
from moepack.storage.regular_file import read_back

NAME = "mirror.json"
_FORMAT = "moepack mirror"
_VERSION = 1
_MAX_LENGTH = 256 << 20


class Description(NamedTuple):
    """The values of mirror.json: the `ranges` of each file that are mirrored.

    `content` is `Index.content_digest` of the pack, `pack` its path when it was mirrored, `hottest`
    the bytes of the budget, None for all experts.
    """

    content: int
    pack: str
    hottest: int | None
    ranges: Mapping[str, Ranges]

    @property
    def length(self) -> int:
        """The bytes that are mirrored."""
        return sum(end - start for ranges in self.ranges.values() for start, end in ranges)


class Mirror(NamedTuple):
    """The mirror of an open pack, in the folder at `path`.

    `problem` is the reason why it must not be read; None for a sound one, which has a
    `description`.
    """

    path: Path
    description: Description | None
    problem: str | None


def encode(description: Description) -> bytes:
    """Return the bytes of mirror.json, its own digest among them."""
    return manifest.seal(
        {
            "format": _FORMAT,
            "format_version": _VERSION,
            "pack": quote(os.fsencode(description.pack)),
            "content": digest.to_text(description.content),
            "hottest": description.hottest,
            "ranges": {name: list(map(list, pairs)) for name, pairs in description.ranges.items()},
        }
    )


def decode(data: bytes, path: Path) -> Description:
    """Read the bytes of mirror.json; raise PackError for bytes that `encode` did not write."""
    try:
        description = _described(strict_json.parse(data))
        if encode(description) != data:
            raise ValueError("it was changed after it was written")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{NAME} is damaged, or of another version: {error}"
        raise PackError(problem, path=path) from None
    return description


def _described(body: Any) -> Description:
    if (body["format"], body["format_version"]) != (_FORMAT, _VERSION):
        raise ValueError("of another version")
    ranges: dict[str, Ranges] = {}
    for name, pairs in body["ranges"].items():
        ranges[name] = read_ranges(pairs)
        if not is_plain_name(name):
            raise ValueError("no such file")
    hottest = body["hottest"]
    if hottest is not None and type(hottest) is not int:
        raise ValueError("no such length")
    pack = os.fsdecode(unquote_to_bytes(body["pack"]))
    return Description(digest.from_text(body["content"]), pack, hottest, ranges)


def load(folder: Path) -> Description | None:
    """Return the values of mirror.json in a folder; None if there is none.

    Raises PackError if it is damaged, and OSError.
    """
    path = folder / NAME
    try:
        data = read_back(path, _MAX_LENGTH)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return decode(data, path)


def linked_folder(pack: Path) -> Path | None:
    """Return the folder that the link of a pack leads to, there or not; None without a link."""
    try:
        return pack / os.readlink(pack / MIRROR_NAME)
    except OSError:
        return None


def find_mirror(pack: Path, index: Index) -> Mirror | None:
    """Return the mirror of the pack in a directory; None if it has none."""
    folder = linked_folder(pack)
    if folder is None:
        return None
    try:
        description = load(folder)
    except PackError as error:
        return Mirror(folder, None, error.problem)
    except OSError as error:
        return Mirror(folder, None, f"cannot be read: {error.strerror}")
    problem = None
    if description is None:
        problem = "not there: the drive is missing, or its files were removed"
    elif description.content != index.content_digest():
        problem = "of another pack, or of this one before it was made anew"
    return Mirror(folder, description, problem)
