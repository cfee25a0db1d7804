"""The dense part of a source: every tensor that is no expert's, and all other bytes of its shards.

Experts, dense tensors and these other bytes are all that a shard holds beside zeros, so that it can
be restored to the bit.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from moepack.common.errors import SourceError, read_failure
from moepack.common.sizes import gaps
from moepack.source.experts import Experts
from moepack.source.gguf_header import GgufHeader
from moepack.source.shards import Source, SourceTensor
from moepack.storage.input_file import InputFile, open_input


class ShardRange(NamedTuple):
    """`length` bytes at `offset` of shard number `shard`."""

    shard: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Dense:
    """The bytes beside the experts: tensors in file order, and ranges that belong to no tensor.

    Those are each shard's header, and padding that is not zero.
    """

    tensors: tuple[SourceTensor, ...]
    other_ranges: tuple[ShardRange, ...]


def find_dense(source: Source, experts: Experts) -> Dense:
    """Find the dense part of a source, also in its padding. Raises SourceError, MachineError."""
    tensors = (each for each in source.tensors() if each.tensor.name not in experts.names)
    ranges = (_other_ranges(number, header) for number, header in enumerate(source.shards))
    return Dense(tuple(tensors), tuple(chain.from_iterable(ranges)))


def header_length(header: GgufHeader) -> int:
    """Return the bytes of a shard before its tensor data; a shard without any may end earlier."""
    return min(header.data_offset, header.file_length)


def _other_ranges(number: int, header: GgufHeader) -> Iterator[ShardRange]:
    yield ShardRange(number, 0, header_length(header))
    try:
        with closing(open_input(header.path)) as file:
            tensors = ((tensor.offset, tensor.offset + tensor.length) for tensor in header.tensors)
            for start, end in gaps(header_length(header), header.file_length, tensors):
                if not _is_zero(file, start, end):
                    yield ShardRange(number, start, end - start)
    except OSError as error:
        raise read_failure(error, header.path, SourceError) from None


def _is_zero(file: InputFile, start: int, end: int) -> bool:
    length = 0
    for piece in file.stream(start, end - start):
        length += len(piece)
        if piece.count(0) != len(piece):
            return False
    return length == end - start
