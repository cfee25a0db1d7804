"""The verifier's own reading of the shards: expert slices and all other tensors.

It shares nothing with the packer on purpose: another walk over the headers of mapped files, and
other matching of names (by fields, not by pattern). A mistake on either side makes the two
disagree, and verification fail. A tensor's length comes from the gap to the next one; only if a gap
leaves several lengths (few rows, such as biases), the verifier's table of block sizes decides.

A shard that is broken raises SourceError.
"""

import contextlib
import itertools
import math
import mmap
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from moepack.common.errors import SourceError, read_failure
from moepack.pack.verifying.block_sizes import stated_length
from moepack.source import sniff
from moepack.storage.input_file import open_input

_MOST_DIMENSIONS = 4
_LONGEST_NAME = 1 << 16
_MOST_STRINGS = 1 << 22
_MOST_EXPERTS = 1 << 16
_LONGEST_TEXT = 200
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_DIMENSIONS = {"weight": 3, "bias": 2, "scale": 1, "input_scale": 1}


class WalkedTensor(NamedTuple):
    """A tensor: shape in GGUF order, `start` from the start of its shard, `length` in bytes.

    `is_open` says that the type is unknown and the gap leaves more than one length; `shard` is the
    number of its shard in a `Witness`.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    length: int
    is_open: bool = False
    shard: int = 0


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


_STARTS = (32 << 20, 512 << 20)
"""Bytes of a remote shard in which its header is looked for."""


def walk(path: str) -> WalkedShard:
    """Walk the header of one shard."""
    try:
        with contextlib.closing(open_input(path)) as file:
            length = file.stamp.length
            if file.descriptor is not None:
                with mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ) as data:
                    return _HeaderWalk(path, data, length).shard()
            for start_length in _STARTS[:-1]:
                with contextlib.suppress(struct.error, IndexError):
                    start = b"".join(file.stream(0, start_length))
                    return _HeaderWalk(path, start, length).shard()
            return _HeaderWalk(path, b"".join(file.stream(0, _STARTS[-1])), length).shard()
    except OSError as error:
        raise read_failure(error, path, SourceError) from error
    except (ValueError, LookupError, ArithmeticError, struct.error) as error:
        raise SourceError(f"the verifier cannot read the header ({error})", path=path) from error


class _HeaderWalk:
    def __init__(self, path: str, data: mmap.mmap | bytes, length: int) -> None:
        if data[:4] != b"GGUF":
            problem, hint = sniff.describe(path, data[:64])
            raise SourceError(problem, path=path, hint=hint)
        self.path = path
        self.data = data
        self.length = length
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
        ends = [*sorted({begin + offset for *_, offset in table}), self.length]
        following = dict(itertools.pairwise(ends))
        return WalkedShard(
            path=self.path,
            length=self.length,
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
        """Step over the metadata, and keep short values."""
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

    def value(self, kind: int) -> int | str | None:
        """Step over a metadata value; return it if it is a u16, a u32 or a short text."""
        if kind in (2, 4):
            return self.number("H" if kind == 2 else "I")
        if kind == 8:
            length = self.number("Q")
            self.at += length
            if length <= _LONGEST_TEXT:
                return self.data[self.at - length : self.at].decode(errors="backslashreplace")
        elif kind == 9:
            item, count = self.number("I"), self.number("Q")
            if item == 8 and count > _MOST_STRINGS:
                raise ValueError(f"{count:,} strings at byte {self.at:,}")
            if item == 8:
                for _ in range(count):
                    length = self.number("Q")
                    self.at += length
            else:
                self.at += count * _WIDTHS[item]
        else:
            self.at += _WIDTHS[kind]
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
        length = stated_length(type_id, shape)
        if length is None:
            length = longest if fitting else gap
            return WalkedTensor(name, shape, type_id, start, length, len(fitting) != 1)
        if not max(0, gap - self.alignment) < length <= gap:
            raise SourceError(
                "the verifier's block sizes do not fit the gap",
                path=self.path,
                place=f"tensor {name!r}",
                expected=f"{length:,} bytes",
                found=f"a gap of {gap:,}",
            )
        return WalkedTensor(name, shape, type_id, start, length)


class PartSlices(NamedTuple):
    """One part of all experts of a layer; `length` in bytes and `shape` are those of one expert.

    `places` are the number of the shard and the offset there, for each expert.
    """

    type_id: int
    shape: tuple[int, ...]
    length: int
    places: Sequence[tuple[int, int]]


class Witness(NamedTuple):
    """The shards in their order; expert parts by layer and name, dense tensors by name."""

    shards: tuple[WalkedShard, ...]
    parts: dict[tuple[int, str], PartSlices]
    dense: dict[str, WalkedTensor]


def read_shards(paths: Sequence[str], *, sort: bool = False) -> Witness:
    """Read the headers of the shards at `paths`; with `sort`, order them by their own numbers."""
    shards = [walk(path) for path in paths]
    if sort:
        shards.sort(key=lambda shard: shard.numbers.get("split.no", 0))
    parts: dict[tuple[int, str], PartSlices] = {}
    dense: dict[str, WalkedTensor] = {}
    alone: dict[tuple[int, str], dict[int, WalkedTensor]] = defaultdict(dict)
    for number, shard in enumerate(shards):
        for walked in shard.tensors:
            tensor = walked._replace(shard=number)
            fields = tensor.name.split(".")
            if _is_stacked(fields, tensor.shape):
                *shape, count = tensor.shape
                _check_length(shard, tensor, count)
                length = tensor.length // count
                starts = range(tensor.start, tensor.start + tensor.length, length)
                places = [(number, start) for start in starts]
                key = int(fields[1]), ".".join(fields[2:])
                parts[key] = PartSlices(tensor.type_id, tuple(shape), length, places)
            elif _is_alone(fields, tensor.shape):
                _check_length(shard, tensor, 1)
                alone[int(fields[1]), f"{fields[2]}_exps.weight"][int(fields[3])] = tensor
            else:
                dense[tensor.name] = tensor
    for key, by_expert in alone.items():
        in_order = [by_expert[expert] for expert in sorted(by_expert)]
        places = [(tensor.shard, tensor.start) for tensor in in_order]
        parts[key] = PartSlices(in_order[0].type_id, in_order[0].shape, in_order[0].length, places)
    return Witness(tuple(shards), parts, dense)


def _check_length(shard: WalkedShard, tensor: WalkedTensor, count: int) -> None:
    """Check that the tensor's length is known and that of `count` slices."""
    if not tensor.length:
        problem = "an empty tensor"
    elif count > _MOST_EXPERTS:
        problem = f"{count:,} experts"
    elif tensor.is_open:
        problem = "its length is open"
    elif tensor.length % count:
        problem = "it does not divide into experts"
    else:
        return
    raise SourceError(problem, path=shard.path, place=f"tensor {tensor.name!r}")


def _is_stacked(fields: list[str], shape: tuple[int, ...]) -> bool:
    if len(fields) != 4 or fields[0] != "blk" or not _is_number(fields[1]):
        return False
    return fields[2].endswith("exps") and len(shape) == _DIMENSIONS.get(fields[3])


def _is_alone(fields: list[str], shape: tuple[int, ...]) -> bool:
    if len(fields) != 5 or len(shape) != 2:
        return False
    block, layer, name, expert, kind = fields
    is_weight = (block, kind) == ("blk", "weight") and name in ("ffn_gate", "ffn_up", "ffn_down")
    return is_weight and _is_number(layer) and _is_number(expert)


def _is_number(field: str) -> bool:
    return field.isascii() and field.isdigit()
