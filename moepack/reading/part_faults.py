"""Errors of parts whose record does not fit that of their blob."""

from moepack.errors import PackError
from moepack.format.tables import PartKind

Part = tuple[int, int, PartKind]
"""Layer, expert and kind."""


def part_apart(index_path: str, part: Part, file: int) -> PackError:
    """Return the error for a part outside blobs, as in an index, that lies in a data file."""
    return PackError(
        "a part of an expert without a blob lies in no shard",
        path=index_path,
        place=_place(part),
        found=f"file {file}, which is a data file",
    )


def part_outside(
    index_path: str,
    part: Part,
    extent: tuple[int, int, int],
    blob: tuple[int, int, int, int, int],
) -> PackError:
    """Return the error for a part at `extent` (file, offset, length) that is not in its blob."""
    file, offset, length = extent
    return PackError(
        "a part lies outside its blob",
        path=index_path,
        place=_place(part),
        expected=f"file {blob[4]}, bytes {blob[0]:,} to {blob[0] + blob[1]:,}",
        found=f"file {file}, bytes {offset:,} to {offset + length:,}",
    )


def _place(part: Part) -> str:
    layer, expert, kind = part
    return f"layer {layer} expert {expert} {kind.name}"
