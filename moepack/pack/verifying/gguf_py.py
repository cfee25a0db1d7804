"""A second opinion on the source, by gguf-py, the reader of llama.cpp's own tools.

It takes nothing from the witness or the packer: tensors, types, their sizes, shapes, offsets and
bytes are gguf-py's, which maps the shards. From the index it takes the names of tensors, and the
places of their bytes now.

It brings numpy and gguf, so it is imported only when it is requested.
"""

import os
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray

from moepack.common.errors import SourceError, read_failure
from moepack.pack.format.tables import PackedFamily, PartKind
from moepack.pack.verifying.block_sizes import BLOCK_SIZES
from moepack.pack.verifying.checked_pack import CheckedPack, CheckedRange, Where
from moepack.pack.verifying.scan import Buffer
from moepack.storage.regular_file import open_regular

Bytes = NDArray[np.uint8]


class _Shape(NamedTuple):
    """Type, dimensions in GGUF order, and length in bytes of a tensor."""

    type_id: int
    shape: tuple[int, ...]
    length: int

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "one value"
        return f"{shape} of type {self.type_id}, {self.length:,} bytes"


class Opinion:
    """gguf-py's reading of the tensors in a pack's index, from the shards at `paths`.

    Names, types, shapes and lengths that differ are findings at once, and shards with types that
    gguf-py does not know are not looked at; `piece` returns the bytes. Raises SourceError for a
    shard that cannot be read at all, and MachineError.
    """

    def __init__(self, pack: CheckedPack, paths: Iterable[str]) -> None:
        self._pack = pack
        self._tensors: dict[str, tuple[_Shape, NDArray[Any]]] = {}
        """The tensors as gguf-py reads them, with the slowest axis of the data first."""
        self._is_complete = True
        self._bytes: dict[tuple[int | None, int | None, str], Bytes] = {}
        """The bytes of parts and tensors, by layer, expert and name."""
        self._wrong_sizes: set[int] = set()
        for path in paths:
            self._read(path)
        self._find_all()

    def piece(self, checked: CheckedRange, at: int, length: int) -> Buffer | None:
        """Return `length` bytes of a part or tensor from byte `at` on; None if they are unknown."""
        where = checked.where
        name = where.get("part") or where.get("tensor") or ""
        data = self._bytes.get((where.get("layer"), where.get("expert"), name))
        if data is None:
            return None
        piece = data[at : at + length]
        return Buffer(piece.data, piece.__array_interface__["data"][0])

    def _read(self, path: str) -> None:
        try:
            with open(open_regular(path), "rb") as file:
                tensors = GGUFReader(file).tensors
        except OSError as error:
            raise read_failure(error, path, SourceError) from None
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            self._note_unreadable(os.path.basename(path), error)
            return
        for tensor in tensors:
            if tensor.name in self._tensors:
                self._find("gguf-py reads it in two shards", tensor=tensor.name)
            shape = tuple(int(count) for count in tensor.shape)
            facts = _Shape(int(tensor.tensor_type), shape, int(tensor.n_bytes))
            self._tensors[tensor.name] = facts, tensor.data

    def _note_unreadable(self, name: str, error: Exception) -> None:
        """Tell types that gguf-py does not know from a shard that it takes for broken."""
        self._is_complete = False
        reader = f"gguf-py {version('gguf')}"
        families, tensors = self._pack.index.families, self._pack.tensors.values()
        types = {kind.type_id for family in families for kind in family.part_kinds}
        types |= {tensor.type_id for tensor in tensors}
        unknown = sorted(types - set(map(int, GGMLQuantizationType)))
        if unknown:
            numbers = ", ".join(map(str, unknown))
            text = f"what {reader} reads in {name}: it does not know GGML's types {numbers}"
            self._pack.not_looked_at.append(text)
        else:
            reason = error.args[0] if error.args else type(error).__name__
            self._find(f"{reader} cannot read this shard: {reason}", file=name)

    def _find(self, message: str, **where: Any) -> None:
        self._pack.findings.add("gguf-py", message, **where)

    def _find_all(self) -> None:
        """Find all tensors in the index; a whole pack lacks any others."""
        names = set()
        for family in self._pack.index.families:
            for kind in family.part_kinds:
                names |= self._find_part(family, kind)
        for tensor in self._pack.tensors.values():
            names.add(tensor.name)
            facts = _Shape(tensor.type_id, tensor.shape, tensor.length)
            data = self._data(tensor.name, facts, tensor.type_name, {"tensor": tensor.name})
            if data is not None:
                self._bytes[None, None, tensor.name] = _flat(data)
        if self._pack.index.is_whole:
            for name in sorted(self._tensors.keys() - names):
                self._find("gguf-py reads it in the source", tensor=name)

    def _find_part(self, family: PackedFamily, kind: PartKind) -> set[str]:
        """Find one part of all experts of a layer; return the names of its tensors."""
        where: Where = {"layer": family.layer, "part": kind.name}
        experts = range(family.expert_count)
        if kind.origin.first_slice is None:
            name = f"blk.{family.layer}.{kind.name}"
            shape, length = (*kind.shape, len(experts)), kind.length * len(experts)
            data = self._data(name, _Shape(kind.type_id, shape, length), kind.type_name, where)
            if data is not None:
                for expert in experts:
                    self._bytes[family.layer, expert, kind.name] = _flat(data[expert])
            return {name}
        facts = _Shape(kind.type_id, kind.shape, kind.length)
        stem = f"blk.{family.layer}.{kind.name.removesuffix('_exps.weight')}"
        for expert in experts:
            of_expert = where | {"expert": expert}
            data = self._data(f"{stem}.{expert}.weight", facts, kind.type_name, of_expert)
            if data is not None:
                self._bytes[family.layer, expert, kind.name] = _flat(data)
        return {f"{stem}.{expert}.weight" for expert in experts}

    def _data(self, name: str, facts: _Shape, type_name: str, where: Where) -> NDArray[Any] | None:
        """Return the data of a tensor; None if it is not as the index says."""
        tensor = self._tensors.get(name)
        if tensor is None:
            if self._is_complete:
                self._find(f"gguf-py reads no {name} in the source", **where)
            return None
        shape, data = tensor
        if facts.type_id == shape.type_id and not self._has_right_size(facts.type_id):
            return None
        if facts != shape:
            self._find(f"it is {facts}; gguf-py reads {shape}", **where)
            return None
        theirs = GGMLQuantizationType(facts.type_id).name
        if type_name not in (theirs, f"type-{facts.type_id}"):
            self._find(f"its type is {type_name}; gguf-py reads {theirs}", **where)
        return data

    def _has_right_size(self, type_id: int) -> bool:
        """Compare the verifier's own block size with gguf-py's, once for each type."""
        ours = BLOCK_SIZES.get(type_id)
        theirs = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        if ours is None or theirs == (ours.element_count, ours.length):
            return True
        if type_id not in self._wrong_sizes:
            self._wrong_sizes.add(type_id)
            message = f"a block of {ours.type_name} has {ours.element_count} elements in "
            message += f"{ours.length} bytes; by gguf-py {theirs[0]} in {theirs[1]}"
            self._find(message)
        return False


def _flat(data: NDArray[Any]) -> Bytes:
    return data.reshape(-1).view(np.uint8)
