"""The verifier's own way from shards to expert slices.

This module shares nothing with the packer's parser on purpose: another walk over the header
(mapped, not read), other matching of names (by fields, not by pattern), and tensor lengths from the
gaps in the file instead of a table of types. Only where a gap leaves several lengths (few rows,
such as biases) the gguf package's table of block sizes decides. A mistake on either side makes the
two disagree, and verification fail.

What is broken in a shard comes back as SourceError.
"""

import contextlib
import itertools
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from moepack.errors import MachineError, SourceError, is_shortage
from moepack.source import sniff
from moepack.storage.regular_file import open_regular

_MATRICES = {"gate", "up", "down", "gate_up"}
_DIMENSIONS = {"weight": 3, "bias": 2, "scale": 1, "input_scale": 1}
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 1 << 16
_MOST_STRINGS = 1 << 22
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class PartKey(NamedTuple):
    """A part by its layer and its name there."""

    layer: int
    part: str


class PartSlices(NamedTuple):
    """One part of all experts of a layer, in a shard.

    `starts` are offsets from the start of the file `paths[expert]`; `length` is bytes and `shape`
    GGUF order, both of one expert.
    """

    type_id: int
    shape: tuple[int, ...]
    length: int
    paths: Sequence[str]
    starts: Sequence[int]


class _WalkedTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    length: int


def in_order(paths: Sequence[str]) -> list[str]:
    """Sort the shards of a model by the numbers that they state."""
    return sorted(paths, key=_shard_number)


def find_slices(paths: Sequence[str]) -> dict[PartKey, PartSlices]:
    """Map each part to the slices that the shards hold."""
    slices: dict[PartKey, PartSlices] = {}
    alone: dict[PartKey, dict[int, tuple[str, _WalkedTensor]]] = {}
    for path in paths:
        for tensor in _walk(path):
            fields = tensor.name.split(".")
            if _is_stacked(fields, tensor.shape):
                key = PartKey(int(fields[1]), ".".join(fields[2:]))
                slices[key] = _cut(path, tensor)
            elif _is_alone(fields, tensor.shape):
                key = PartKey(int(fields[1]), f"{fields[2]}_exps.weight")
                alone.setdefault(key, {})[int(fields[3])] = (path, tensor)
    for key, by_expert in alone.items():
        slices[key] = _join(by_expert)
    return slices


def _cut(path: str, tensor: _WalkedTensor) -> PartSlices:
    """Cut a tensor of all experts into slices of the same length."""
    *shape, count = tensor.shape
    length = tensor.length // count
    starts = range(tensor.start, tensor.start + tensor.length, length)
    return PartSlices(tensor.type_id, tuple(shape), length, [path] * count, starts)


def _join(by_expert: dict[int, tuple[str, _WalkedTensor]]) -> PartSlices:
    """Take tensors of one expert each together."""
    in_order = [by_expert[expert] for expert in sorted(by_expert)]
    first = in_order[0][1]
    return PartSlices(
        first.type_id,
        first.shape,
        first.length,
        [path for path, _ in in_order],
        [tensor.start for _, tensor in in_order],
    )


def _is_stacked(fields: list[str], shape: tuple[int, ...]) -> bool:
    if len(fields) != 4 or fields[0] != "blk" or not _is_number(fields[1]):
        return False
    if len(shape) != _DIMENSIONS.get(fields[3]):
        return False
    words = fields[2].split("_")
    is_ffn = words[0] == "ffn" and words[-1] in ("exps", "chexps")
    return fields[2] == "attn_v_exps" or (is_ffn and "_".join(words[1:-1]) in _MATRICES)


def _is_alone(fields: list[str], shape: tuple[int, ...]) -> bool:
    return (
        len(fields) == 5
        and fields[0] == "blk"
        and fields[2] in ("ffn_gate", "ffn_up", "ffn_down")
        and _is_number(fields[1])
        and _is_number(fields[3])
        and fields[4] == "weight"
        and len(shape) == 2
    )


def _is_number(field: str) -> bool:
    return field.isascii() and field.isdigit()


def _walk(path: str) -> list[_WalkedTensor]:
    """Walk the header of one shard; only expert tensors need a length that makes sense."""
    with _mapped(path) as data:
        return _HeaderWalk(path, data).tensors()


def _shard_number(path: str) -> int:
    with _mapped(path) as data:
        return _HeaderWalk(path, data).metadata().get(b"split.no", 0)


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
        kind = MachineError if is_shortage(error) else SourceError
        raise kind(f"cannot read: {error.strerror}", path=path) from error
    except (ValueError, LookupError, ArithmeticError, struct.error) as error:
        raise SourceError(f"the verifier cannot read the header ({error})", path=path) from error


class _HeaderWalk:
    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 24
        self.alignment = 32

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def name(self) -> bytes:
        length = self.number("Q")
        if length > _LONGEST_NAME:
            raise ValueError(f"a name of {length} bytes at byte {self.at}")
        self.at += length
        return self.data[self.at - length : self.at]

    def tensors(self) -> list[_WalkedTensor]:
        self.alignment = self.metadata().get(b"general.alignment", self.alignment)
        (tensor_count,) = struct.unpack_from("<Q", self.data, 8)
        table = []
        for _ in range(tensor_count):
            name = self.name().decode(errors="replace")
            shape = self.shape()
            table.append((name, shape, self.number("I"), self.number("Q")))
        begin = math.ceil(self.at / self.alignment) * self.alignment
        ends = [*sorted(begin + offset for *_, offset in table), len(self.data)]
        following = dict(itertools.pairwise(ends))
        return [
            self.tensor(name, shape, type_id, begin + offset, following[begin + offset])
            for name, shape, type_id, offset in table
        ]

    def metadata(self) -> dict[bytes, int]:
        """Step over the metadata; return the values that are a u16 or a u32."""
        (pair_count,) = struct.unpack_from("<Q", self.data, 16)
        numbers = {}
        for _ in range(pair_count):
            key = self.name()
            value = self.value(self.number("I"))
            if value is not None:
                numbers[key] = value
        return numbers

    def shape(self) -> tuple[int, ...]:
        count = self.number("I")
        if count > _MOST_DIMENSIONS:
            raise ValueError(f"{count} dimensions at byte {self.at}")
        return tuple(self.number("Q") for _ in range(count))

    def skip(self, length: int) -> None:
        self.at += length

    def value(self, kind: int) -> int | None:
        """Step over a metadata value; return it where it is a u16 or a u32."""
        if kind in (2, 4):
            return self.number("H" if kind == 2 else "I")
        if kind == 8:
            self.skip(self.number("Q"))
        elif kind == 9:
            item, count = self.number("I"), self.number("Q")
            if item == 8 and count > _MOST_STRINGS:
                raise ValueError(f"{count} strings at byte {self.at}")
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
    ) -> _WalkedTensor:
        length = end - start
        if "exps" in name or name.count(".") == 4:
            length = self.tensor_length(name, shape, type_id, end - start)
        return _WalkedTensor(name, shape, type_id, start, length)

    def tensor_length(self, name: str, shape: tuple[int, ...], type_id: int, gap: int) -> int:
        """Take the length that fills the gap up to its padding; ask the gguf package if many do."""
        rows = max(1, math.prod(shape[1:]))
        longest = gap - gap % rows
        if not gap or 0 in shape:
            raise SourceError("an empty tensor", path=self.path, place=f"tensor {name!r}")
        fitting = range(longest, max(0, gap - self.alignment), -rows)
        stated = _stated_length(shape, type_id)
        if stated is not None and stated not in fitting:
            raise SourceError(
                "the gguf package's block sizes do not fit the gap",
                path=self.path,
                place=f"tensor {name!r}",
                expected=f"{stated} bytes",
                found=f"a gap of {gap}",
            )
        if stated is None and len(fitting) != 1:
            raise SourceError("its length is open", path=self.path, place=f"tensor {name!r}")
        return longest if stated is None else stated


def _stated_length(shape: tuple[int, ...], type_id: int) -> int | None:
    """Return a tensor's bytes by the gguf package; None for types that it does not know."""
    try:
        known = GGMLQuantizationType(type_id)
    except ValueError:
        return None
    if known == GGMLQuantizationType.Q8_1:  # gguf 0.19.0 says 40 bytes a block, C says 36
        return None
    elements, length = GGML_QUANT_SIZES[known]
    stated: int = math.prod(shape) // elements * length
    return stated
