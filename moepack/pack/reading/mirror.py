"""The mirror of a pack: some of its bytes a second time, in a folder on another drive.

    PACK/.mirror                a link to the folder, made last
    folder/mirror.json          the record of the bytes there
    folder/experts-00000.bin    named as in the pack, and as long; what is not mirrored is a hole

All of it lies beside the pack's format: the pack is the same with and without it. What makes a
mirror is `moepack.packing.copies.mirror`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import PackError
from moepack.pack.format.index import Index
from moepack.pack.format.names import MIRROR_NAME
from moepack.pack.reading import copy_record
from moepack.pack.reading.copy_record import CopyRecord

NAME = "mirror.json"


class Mirror(NamedTuple):
    """The mirror of an open pack, in the folder at `path`.

    `problem` is the reason why it must not be read; None for a sound one, which has a `record`.
    """

    path: Path
    record: CopyRecord | None
    problem: str | None


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
        record = copy_record.load(folder / NAME)
    except PackError as error:
        return Mirror(folder, None, error.problem)
    except OSError as error:
        return Mirror(folder, None, f"cannot be read: {error.strerror}")
    problem = None
    if record is None:
        problem = "not there: the drive is missing, or its files were removed"
    elif record.pack_digest != index.content_digest():
        problem = "of another pack, or of this one before it was made anew"
    return Mirror(folder, record, problem)
