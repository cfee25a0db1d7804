"""The verifier's own walk over the header of one shard: its tensors, and where they end.

It shares nothing with the packer's parser on purpose: the file is mapped, not read, and a tensor's
length comes from the gap to the next one. Only where a gap leaves several lengths (few rows, such
as biases) the verifier's table of block sizes decides.

What is broken in a shard comes back as SourceError.
"""

import contextlib
import itertools
import math
import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple

from moepack.errors import SourceError, read_failure
from moepack.source import sniff
from moepack.storage.regular_file import open_regular
from moepack.verifying.block_sizes import stated_length

_MOST_DIMENSIONS = 4
_LONGEST_NAME = 1 << 16
_MOST_STRINGS = 1 << 22
_LONGEST_TEXT = 200
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class WalkedTensor(NamedTuple):
    """A tensor: shape in GGUF order, `start` from the start of its shard, `length` in bytes.

    `is_open` says that the type is unknown and the gap leaves more than one length.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    length: int
    is_open: bool = False


class WalkedShard(NamedTuple):
    """A shard: lengths in bytes, its tensors in the order of its table.

    `texts` and `numbers` are the metadata's short texts and u16 and u32 values by their keys.
    """

    path: str
    length: int
    header_length: int
    tensors: tuple[WalkedTensor, ...]
    texts: dict[str, str]
    numbers: dict[str, int]


def walk(path: str) -> WalkedShard:
    """Walk the header of one shard."""
    with _mapped(path) as data:
        return _HeaderWalk(path, data).shard()


@contextlib.contextmanager
def _mapped(path: str) -> Iterator[mmap.mmap]:
    """Map a shard; what the system says of it, or its walk, is an error that names the shard."""
    try:
        with (
            open(open_regular(path), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            if data[:4] != b"GGUF":
                problem, hint = sniff.describe(path, data[:64])
                raise SourceError(problem, path=path, hint=hint)
            yield data
    except OSError as error:
        raise read_failure(error, path, SourceError) from error
    except (ValueError, LookupError, ArithmeticError, struct.error) as error:
        raise SourceError(f"the verifier cannot read the header ({error})", path=path) from error


class _HeaderWalk:
    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 24
        self.alignment = 32
        self.texts: dict[str, str] = {}
        self.numbers: dict[str, int] = {}

    def shard(self) -> WalkedShard:
        self.metadata()
        self.alignment = self.numbers.get("general.alignment", self.alignment)
        (tensor_count,) = struct.unpack_from("<Q", self.data, 8)
        table = []
        for _ in range(tensor_count):
            name = self.name().decode(errors="replace")
            shape = self.shape()
            table.append((name, shape, self.number("I"), self.number("Q")))
        begin = self.at
        if table:
            begin = math.ceil(self.at / self.alignment) * self.alignment
        ends = [*sorted({begin + offset for *_, offset in table}), len(self.data)]
        following = dict(itertools.pairwise(ends))
        return WalkedShard(
            path=self.path,
            length=len(self.data),
            header_length=begin,
            tensors=tuple(
                self.tensor(name, shape, type_id, begin + offset, following[begin + offset])
                for name, shape, type_id, offset in table
            ),
            texts=self.texts,
            numbers=self.numbers,
        )

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def name(self) -> bytes:
        length = self.number("Q")
        if length > _LONGEST_NAME:
            raise ValueError(f"a name of {length:,} bytes at byte {self.at:,}")
        self.at += length
        return self.data[self.at - length : self.at]

    def metadata(self) -> None:
        """Step over the metadata, and keep what is short."""
        (pair_count,) = struct.unpack_from("<Q", self.data, 16)
        for _ in range(pair_count):
            key = self.name().decode(errors="replace")
            value = self.value(self.number("I"))
            if isinstance(value, int):
                self.numbers[key] = value
            elif value is not None:
                self.texts[key] = value

    def shape(self) -> tuple[int, ...]:
        count = self.number("I")
        if count > _MOST_DIMENSIONS:
            raise ValueError(f"{count:,} dimensions at byte {self.at:,}")
        return tuple(self.number("Q") for _ in range(count))

    def skip(self, length: int) -> None:
        self.at += length

    def value(self, kind: int) -> int | str | None:
        """Step over a metadata value; return it where it is a u16, a u32 or a short text."""
        if kind in (2, 4):
            return self.number("H" if kind == 2 else "I")
        if kind == 8:
            length = self.number("Q")
            self.skip(length)
            if length <= _LONGEST_TEXT:
                return self.data[self.at - length : self.at].decode(errors="backslashreplace")
        elif kind == 9:
            item, count = self.number("I"), self.number("Q")
            if item == 8 and count > _MOST_STRINGS:
                raise ValueError(f"{count:,} strings at byte {self.at:,}")
            if item == 8:
                for _ in range(count):
                    self.skip(self.number("Q"))
            else:
                self.skip(count * _WIDTHS[item])
        else:
            self.skip(_WIDTHS[kind])
        return None

    def tensor(
        self, name: str, shape: tuple[int, ...], type_id: int, start: int, end: int
    ) -> WalkedTensor:
        """Take the length that fills the gap up to its padding; ask the table if many do."""
        if 0 in shape:
            return WalkedTensor(name, shape, type_id, start, 0)
        gap = end - start
        rows = math.prod(shape[1:])
        longest = gap - gap % rows
        fitting = range(longest, max(0, gap - self.alignment), -rows)
        stated = stated_length(type_id, shape)
        if stated is None:
            length = longest if fitting else gap
            return WalkedTensor(name, shape, type_id, start, length, len(fitting) != 1)
        if stated not in fitting:
            raise SourceError(
                "the verifier's block sizes do not fit the gap",
                path=self.path,
                place=f"tensor {name!r}",
                expected=f"{stated:,} bytes",
                found=f"a gap of {gap:,}",
            )
        return WalkedTensor(name, shape, type_id, start, stated)
