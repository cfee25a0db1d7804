"""The dense part of a source: every tensor that is no expert's, and all other bytes of its shards.

Experts, dense tensors and these other bytes are all that a shard holds beside zeros, so that it can
be restored to the bit.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moepack.errors import SourceError, read_failure
from moepack.source.experts import Experts
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source
from moepack.source.tensor_table import Tensor
from moepack.storage.regular_file import open_regular

_PIECE_LENGTH = 1 << 20


class ShardRange(NamedTuple):
    """`length` bytes at `offset` of shard number `shard`."""

    shard: int
    offset: int
    length: int


class SourceTensor(NamedTuple):
    """A tensor, and the number of the shard that holds it."""

    shard: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """What is no expert's: tensors in file order, and ranges that belong to no tensor.

    Those are each shard's header, and padding that is not zero.
    """

    tensors: tuple[SourceTensor, ...]
    other_ranges: tuple[ShardRange, ...]


def find_dense(source: Source, experts: Experts) -> Dense:
    """Find the dense part of a source; reads the padding of its shards.

    Raises SourceError or MachineError where a shard cannot be read.
    """
    return Dense(
        tensors=tuple(
            SourceTensor(shard, tensor)
            for shard, tensor in source.tensors()
            if tensor.name not in experts.names
        ),
        other_ranges=tuple(
            found
            for number, header in enumerate(source.shards)
            for found in _other_ranges(number, header)
        ),
    )


def header_length(header: GgufHeader) -> int:
    """Return the bytes of a shard before its tensor data; a shard without any may end earlier."""
    return min(header.data_offset, header.file_length)


def _other_ranges(number: int, header: GgufHeader) -> Iterator[ShardRange]:
    yield ShardRange(number, 0, header_length(header))
    try:
        with open(open_regular(header.path), "rb", buffering=0) as file:
            for start, end in _gaps(header):
                if _has_other_than_zeros(file.fileno(), start, end):
                    yield ShardRange(number, start, end - start)
    except OSError as error:
        raise read_failure(error, header.path, SourceError) from None


def _gaps(header: GgufHeader) -> Iterator[tuple[int, int]]:
    """Yield where each range of padding starts and ends."""
    position = header_length(header)
    for tensor in header.tensors:
        if tensor.offset > position:
            yield position, tensor.offset
        position = tensor.offset + tensor.length
    if header.file_length > position:
        yield position, header.file_length


def _has_other_than_zeros(descriptor: int, start: int, end: int) -> bool:
    while start < end:
        piece = os.pread(descriptor, min(_PIECE_LENGTH, end - start), start)
        if not piece:
            return False
        if piece.count(0) != len(piece):
            return True
        start += len(piece)
    return False
