"""The tensor table of one GGUF file, checked against the file.

The rules are llama.cpp's (ggml/src/gguf.cpp, b11549): each tensor starts where the padded one
before it ends. That the last one ends where the file does is for `gguf_header` to check.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NoReturn

from moepack.common.errors import SourceError
from moepack.common.sizes import align
from moepack.source import ggml_types, sniff


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `dims` in GGUF order, `offset` from the start of the file, `length` in bytes.

    With an unknown type, `inferred`, the length follows from the gap to the next tensor; if that
    leaves more than one, `ambiguous`, it is the longest.
    """

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int
    length: int
    inferred: bool = False
    ambiguous: bool = False


TensorEntry = tuple[str, tuple[int, ...], int, int]
"""A line of the tensor table: name, dims, type and offset from the start of the tensor data."""


def place_tensors(
    path: str, entries: list[TensorEntry], data_offset: int, file_length: int, alignment: int
) -> tuple[Tensor, ...]:
    """Check that the tensors fill the data section one after the other; return them.

    A tensor's length has two witnesses, the type's block arithmetic and the gap to the next tensor
    (for the last one: to the end of the file, where the final padding may be absent).
    """
    names = sorted(name for name, *_ in entries)
    for name, next_name in itertools.pairwise(names):
        if name == next_name:
            _fail(path, name, "stands twice")
    tensors = []
    expected = 0
    for number, entry in enumerate(entries):
        name, _, _, offset = entry
        if offset != expected:
            first_byte = f"byte {expected:,} of the tensor data"
            problem = "tensors overlap, or leave a gap"
            _fail(path, name, problem, first_byte, f"byte {offset:,}")
        if offset % alignment:  # possible behind an unknown type, whose length is the gap's
            multiple = f"a multiple of {alignment:,} bytes"
            actual = f"byte {offset:,} of the tensor data"
            _fail(path, name, "offset not aligned", multiple, actual)
        is_last = number + 1 == len(entries)
        end = file_length - data_offset if is_last else entries[number + 1][3]
        tensor, padded = _place(path, entry, data_offset, end - expected, alignment, is_last)
        tensors.append(tensor)
        expected += padded
    return tuple(tensors)


def _place(
    path: str, entry: TensorEntry, data_offset: int, gap: int, alignment: int, is_last: bool
) -> tuple[Tensor, int]:
    """Return the tensor and its length with its padding."""
    name, dims, type_id, offset_in_data = entry
    offset = data_offset + offset_in_data
    ggml_type = ggml_types.TYPES.get(type_id)
    if ggml_type is None:
        if gap < 0:
            _fail(path, name, "overlaps the next tensor", None, f"{-gap:,} bytes in common")
        lengths = _lengths_from_gap(dims, gap, alignment)
        length, is_ambiguous = lengths[-1] if lengths else gap, len(lengths) != 1
        tensor = Tensor(name, dims, type_id, offset, length, inferred=True, ambiguous=is_ambiguous)
        return tensor, gap
    length = _length(path, name, dims, ggml_type)
    padded = align(length, alignment)
    if is_last and gap < length:
        hint = sniff.join_hint(path) or "the download did not finish: download it again"
        expected = f"a file of at least {offset + length:,} bytes"
        problem = "the file ends inside the tensor"
        _fail(path, name, problem, expected, f"{offset + gap:,} bytes", hint)
    return Tensor(name, dims, type_id, offset, length), padded


def _length(path: str, name: str, dims: tuple[int, ...], ggml_type: ggml_types.GgmlType) -> int:
    ne0, row_count = split_rows(dims)
    if ne0 % ggml_type.block_count:
        problem = f"rows are not whole blocks of {ggml_type.name}"
        _fail(path, name, problem, f"a multiple of {ggml_type.block_count}", ne0)
    length = ggml_type.tensor_length(ne0, row_count) if ne0 * row_count else 0
    if length >= 1 << 63:
        _fail(path, name, "too long", "less than 2^63 bytes", f"{length:,} bytes")
    return length


def split_rows(dims: tuple[int, ...]) -> tuple[int, int]:
    """Return (elements in a row, rows); a tensor without dimensions is one element."""
    return (dims[0], math.prod(dims[1:])) if dims else (1, 1)


def _lengths_from_gap(dims: tuple[int, ...], gap: int, alignment: int) -> range:
    """Return the possible lengths of a tensor of an unknown type, from the gap it fills.

    Rows all have the same length, and the padding behind a tensor is shorter than the alignment.
    """
    _, row_count = split_rows(dims)
    if row_count < 1 or gap < 1:
        return range(0)
    first = align(max(gap - alignment + 1, 1), row_count)
    return range(first, gap + 1, row_count)


def _fail(
    path: str,
    name: str,
    problem: str,
    expected: object = None,
    actual: object = None,
    hint: str | None = None,
) -> NoReturn:
    place = f"tensor {name!r}"
    raise SourceError(problem, path=path, place=place, expected=expected, found=actual, hint=hint)
