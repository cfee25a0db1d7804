"""Where the tensors of one GGUF file lie: the tensor table, checked against the file.

The rules are llama.cpp's (ggml/src/gguf.cpp, b11549): each tensor starts where the padded one
before it ends. Here the last one must also end where the file does.
"""

import itertools
import math
from dataclasses import dataclass

from moepack.errors import SourceError
from moepack.sizes import align
from moepack.source import ggml_types, sniff


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `dims` in GGUF order, `offset` from the start of the file, `length` in bytes.

    `inferred` says that the type is unknown and the length follows from the gap to the next tensor;
    then `ambiguous` says that the gap leaves more than one length (`length` is the longest).
    """

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int
    length: int
    inferred: bool = False
    ambiguous: bool = False


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A line of the tensor table; `offset_in_data` counts from the start of the tensor data."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset_in_data: int


def place_tensors(
    path: str, entries: list[TensorEntry], data_offset: int, file_length: int, alignment: int
) -> tuple[Tensor, ...]:
    """Check that the tensors fill the data section one after the other; return them.

    A tensor's length has two witnesses, the type's block arithmetic and the gap to the next tensor
    (for the last one: to the end of the file, where the final padding may be absent).
    """
    if len({entry.name for entry in entries}) != len(entries):
        names = sorted(entry.name for entry in entries)
        twice = next(a for a, b in itertools.pairwise(names) if a == b)
        raise SourceError("stands twice", path=path, place=f"tensor {twice!r}")
    tensors = []
    expected = 0
    for number, entry in enumerate(entries):
        place = f"tensor {entry.name!r}"
        offset = entry.offset_in_data
        if offset != expected:
            raise SourceError(
                "tensors overlap, or leave a gap",
                path=path,
                place=place,
                expected=f"byte {expected:,} of the tensor data",
                found=f"byte {offset:,}",
            )
        if offset % alignment:  # possible behind an unknown type, whose length is the gap's
            raise SourceError(
                "offset not aligned",
                path=path,
                place=place,
                expected=f"a multiple of {alignment:,} bytes",
                found=f"byte {offset:,} of the tensor data",
            )
        is_last = number + 1 == len(entries)
        end = file_length - data_offset if is_last else entries[number + 1].offset_in_data
        tensor, padded = _place(path, entry, data_offset, end - expected, alignment, is_last)
        tensors.append(tensor)
        expected += padded
    return tuple(tensors)


def _place(
    path: str, entry: TensorEntry, data_offset: int, gap: int, alignment: int, is_last: bool
) -> tuple[Tensor, int]:
    """Return the tensor and how far it reaches with its padding."""
    known = ggml_types.TYPES.get(entry.type_id)
    offset = data_offset + entry.offset_in_data
    if known is None:
        if gap < 0:
            raise SourceError(
                "overlaps the next tensor",
                path=path,
                place=f"tensor {entry.name!r}",
                found=f"{-gap:,} bytes in common",
            )
        lengths = lengths_from_gap(entry.dims, gap, alignment)
        tensor = Tensor(
            *(entry.name, entry.dims, entry.type_id, offset, lengths[-1] if lengths else gap),
            inferred=True,
            ambiguous=len(lengths) != 1,
        )
        return tensor, gap
    length = _known_length(path, entry, known)
    padded = align(length, alignment)
    if is_last and gap < length:
        raise SourceError(
            "the file ends inside the tensor",
            path=path,
            place=f"tensor {entry.name!r}",
            expected=f"a file of at least {offset + length:,} bytes",
            found=f"{offset + gap:,} bytes",
            hint=sniff.join_hint(path) or "the download did not finish: download it again",
        )
    if is_last and gap > padded:
        # llama.cpp ignores what follows; here it would take away the second witness of the length.
        raise SourceError(
            "bytes follow the last tensor",
            path=path,
            place=f"tensor {entry.name!r}",
            expected=f"a file of at most {offset + padded:,} bytes",
            found=f"{offset + gap:,} bytes",
            hint="compare the file's length with the published one",
        )
    return Tensor(entry.name, entry.dims, entry.type_id, offset, length), padded


def _known_length(path: str, entry: TensorEntry, known: ggml_types.GgmlType) -> int:
    ne0, row_count = split_rows(entry.dims)
    if ne0 % known.block_count:
        raise SourceError(
            f"rows are not whole blocks of {known.name}",
            path=path,
            place=f"tensor {entry.name!r}",
            expected=f"a multiple of {known.block_count}",
            found=ne0,
        )
    length = known.tensor_length(ne0, row_count) if ne0 * row_count else 0
    if length >= 1 << 63:
        raise SourceError(
            "too long",
            path=path,
            place=f"tensor {entry.name!r}",
            expected="less than 2^63 bytes",
            found=f"{length:,} bytes",
        )
    return length


def split_rows(dims: tuple[int, ...]) -> tuple[int, int]:
    """Return (elements in a row, rows); a tensor without dimensions is one element."""
    return (dims[0], math.prod(dims[1:])) if dims else (1, 1)


def lengths_from_gap(dims: tuple[int, ...], gap: int, alignment: int) -> range:
    """List the lengths that a tensor of an unknown type may have, from the gap it fills.

    Rows all have the same length, and the padding behind a tensor is shorter than the alignment.
    """
    _, row_count = split_rows(dims)
    if row_count < 1 or gap < 1:
        return range(0)
    smallest = max(gap - alignment + 1, 1)
    first = align(smallest, row_count)
    return range(first, gap + 1, row_count)
