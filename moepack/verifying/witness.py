"""The verifier's own way from shards to expert slices.

This module shares nothing with the packer's parser on purpose: another walk over the header
(mapped, not read), other matching of names (by fields, not by pattern), and tensor lengths from the
gaps in the file instead of a table of types. Only where a gap leaves several lengths (few rows,
such as biases) the gguf package's table of block sizes decides. A mistake on either side makes the
two disagree, and verification fail.

It expects shards that are GGUFs; what is broken in one comes back as SourceError.
"""

import itertools
import math
import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from moepack.errors import SourceError

_MATRICES = {"gate", "up", "down", "gate_up"}
_DIMENSIONS = {"weight": 3, "bias": 2, "scale": 1, "input_scale": 1}
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class Slices(NamedTuple):
    """One part of all experts of a layer, in a shard.

    `starts` are offsets from the start of the file `paths[expert]`; `length` is bytes and `shape`
    GGUF order, both of one expert.
    """

    type_id: int
    shape: tuple[int, ...]
    length: int
    paths: Sequence[str]
    starts: Sequence[int]


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    length: int


def find_slices(paths: Sequence[str]) -> dict[tuple[int, str], Slices]:
    """Map (layer, part name) to the slices that the shards hold."""
    found: dict[tuple[int, str], Slices] = {}
    alone: dict[tuple[int, str], dict[int, tuple[str, _Entry]]] = {}
    for path in paths:
        for entry in _entries(path):
            fields = entry.name.split(".")
            if _is_stacked(fields, entry.shape):
                count = entry.shape[-1]
                length = entry.length // count
                starts = range(entry.start, entry.start + entry.length, length)
                key = (int(fields[1]), ".".join(fields[2:]))
                shape = entry.shape[:-1]
                found[key] = Slices(entry.type_id, shape, length, [path] * count, starts)
            elif _is_alone(fields, entry.shape):
                key = (int(fields[1]), f"{fields[2]}_exps.weight")
                alone.setdefault(key, {})[int(fields[3])] = (path, entry)
    for key, by_expert in alone.items():
        found[key] = _join(by_expert)
    return found


def _join(by_expert: dict[int, tuple[str, _Entry]]) -> Slices:
    in_order = [by_expert[expert] for expert in sorted(by_expert)]
    first = in_order[0][1]
    return Slices(
        first.type_id,
        first.shape,
        first.length,
        [path for path, _ in in_order],
        [entry.start for _, entry in in_order],
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


def _entries(path: str) -> list[_Entry]:
    """Walk the header of one shard; only expert tensors need a length that makes sense."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data).entries()
    except (OSError, ValueError, LookupError, ArithmeticError, struct.error) as error:
        raise SourceError(f"the verifier cannot read the header ({error})", path=path) from error


class _Walk:
    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 24
        self.alignment = 32

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def bytes(self) -> bytes:
        length = self.number("Q")
        self.at += length
        return self.data[self.at - length : self.at]

    def entries(self) -> list[_Entry]:
        tensor_count, pair_count = struct.unpack_from("<QQ", self.data, 8)
        for _ in range(pair_count):
            key = self.bytes()
            value = self.value(self.number("I"))
            if key == b"general.alignment" and value is not None:
                self.alignment = value
        table = []
        for _ in range(tensor_count):
            name = self.bytes().decode(errors="replace")
            shape = tuple(self.number("Q") for _ in range(self.number("I")))
            table.append((name, shape, self.number("I"), self.number("Q")))
        begin = math.ceil(self.at / self.alignment) * self.alignment
        ends = [*sorted(begin + offset for *_, offset in table), len(self.data)]
        following = dict(itertools.pairwise(ends))
        return [
            self.entry(name, shape, type_id, begin + offset, following[begin + offset])
            for name, shape, type_id, offset in table
        ]

    def skip(self, length: int) -> None:
        self.at += length

    def value(self, kind: int) -> int | None:
        """Step over a metadata value; give it where it is a u32."""
        if kind == 4:
            return self.number("I")
        if kind == 8:
            self.skip(self.number("Q"))
        elif kind == 9:
            item, count = self.number("I"), self.number("Q")
            if item == 8:
                for _ in range(count):
                    self.skip(self.number("Q"))
            else:
                self.skip(count * _WIDTHS[item])
        else:
            self.skip(_WIDTHS[kind])
        return None

    def entry(
        self, name: str, shape: tuple[int, ...], type_id: int, start: int, end: int
    ) -> _Entry:
        length = end - start
        if "exps" in name or name.count(".") == 4:
            length = self.tensor_length(name, shape, type_id, end - start)
        return _Entry(name, shape, type_id, start, length)

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
    """Give a tensor's bytes by the gguf package; None for types that it does not know."""
    try:
        known = GGMLQuantizationType(type_id)
    except ValueError:
        return None
    if known == GGMLQuantizationType.Q8_1:  # gguf 0.19.0 says 40 bytes a block, C says 36
        return None
    elements, length = GGML_QUANT_SIZES[known]
    stated: int = math.prod(shape) // elements * length
    return stated
