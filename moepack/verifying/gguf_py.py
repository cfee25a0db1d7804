"""A second opinion on the source: what gguf-py reads in it, the reader of llama.cpp's own tools.

It is asked for nothing that the witness or the packer found out: tensors, types, their sizes,
shapes, offsets and bytes are gguf-py's, which maps the shards. Of the pack it needs what the index
says: the names of tensors, and where their bytes lie now.

Brings numpy and gguf, so it is imported where it is asked for.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray

from moepack.errors import PackError, SourceError, read_failure
from moepack.format.dense import DenseTensor
from moepack.format.index import Index
from moepack.format.tables import PackedFamily, PartKind
from moepack.storage.regular_file import open_regular
from moepack.verifying.block_sizes import BLOCK_SIZES
from moepack.verifying.extents import Extent
from moepack.verifying.memory import Memory
from moepack.verifying.places import Where
from moepack.verifying.report import Findings

KIND = "gguf-py"

Bytes = NDArray[np.uint8]


class _Facts(NamedTuple):
    """What a tensor is: `shape` in GGUF order, `length` in bytes."""

    type_id: int
    shape: tuple[int, ...]
    length: int

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "one value"
        return f"{shape} of type {self.type_id}, {self.length:,} bytes"


class _Tensor(NamedTuple):
    """A tensor as gguf-py reads it, with the slowest axis of `data` first."""

    facts: _Facts
    data: NDArray[Any]


class Opinion:
    """What gguf-py reads in the shards at `paths`, of what an index names.

    Names, types, shapes and lengths that differ are findings at once; `piece` gives the bytes.
    `not_looked_at` says in words what gguf-py could not read. Raises SourceError for a shard that
    cannot be read at all, and MachineError.
    """

    def __init__(self, index: Index, paths: Iterable[str], findings: Findings) -> None:
        self.not_looked_at: list[str] = []
        self._index = index
        self._findings = findings
        self._tensors: dict[str, _Tensor] = {}
        self._is_complete = True
        self._bytes: dict[tuple[int | None, int | None, str | None], Bytes] = {}
        """What a part or a tensor has to be, by layer, expert and name."""
        self._wrong_sizes: set[int] = set()
        for path in paths:
            self._read(path)
        self._find_all()

    def piece(self, extent: Extent, at: int, length: int) -> Memory | None:
        """Return `length` bytes of a part or tensor from byte `at` on; None if not known."""
        data = self._bytes.get((extent.layer, extent.expert, extent.part or extent.tensor))
        if data is None:
            return None
        piece = data[at : at + length]
        return Memory(piece.data, piece.__array_interface__["data"][0])

    def _read(self, path: str) -> None:
        """Read the header of a shard, and map the rest."""
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
            facts = _Facts(int(tensor.tensor_type), shape, int(tensor.n_bytes))
            self._tensors[tensor.name] = _Tensor(facts, tensor.data)

    def _note_unreadable(self, name: str, error: Exception) -> None:
        """Tell types that gguf-py does not know from a shard that it takes for broken."""
        self._is_complete = False
        reader = f"gguf-py {version('gguf')}"
        kinds = [kind for family in self._index.families for kind in family.part_kinds]
        types = {kind.type_id for kind in kinds} | set(self._tensor_types())
        unknown = sorted(types - {int(known) for known in GGMLQuantizationType})
        if unknown:
            numbers = ", ".join(map(str, unknown))
            text = f"what {reader} reads in {name}: it does not know GGML's types {numbers}"
            self.not_looked_at.append(text)
        else:
            reason = error.args[0] if error.args else type(error).__name__
            self._find(f"{reader} cannot read this shard: {reason}", file=name)

    def _tensor_types(self) -> Iterator[int]:
        for number in range(self._index.tensor_count):
            with contextlib.suppress(PackError):  # the inventory reports it
                yield self._index.tensor(number).type_id

    def _find(self, message: str, **where: Any) -> None:
        self._findings.add(KIND, message, **where)

    def _find_all(self) -> None:
        """Find all tensors that the index names; what else there is, a whole pack lacks."""
        names = set()
        for family in self._index.families:
            for kind in family.part_kinds:
                names |= self._find_part(family, kind)
        for number in range(self._index.tensor_count):
            with contextlib.suppress(PackError):
                names.add(self._find_dense(self._index.tensor(number)))
        if self._index.is_whole:
            for name in sorted(self._tensors.keys() - names):
                self._find("gguf-py reads it in the source", tensor=name)

    def _find_dense(self, tensor: DenseTensor) -> str:
        facts = _Facts(tensor.type_id, tensor.shape, tensor.length)
        data = self._data(tensor.name, facts, tensor.type_name, {"tensor": tensor.name})
        if data is not None:
            self._bytes[None, None, tensor.name] = _flat(data)
        return tensor.name

    def _find_part(self, family: PackedFamily, kind: PartKind) -> set[str]:
        """Find one part of all experts of a layer; return the names of its tensors."""
        where: Where = {"layer": family.layer, "part": kind.name}
        experts = range(family.expert_count)
        if kind.origin.first_slice is None:
            name = f"blk.{family.layer}.{kind.name}"
            shape, length = (*kind.shape, len(experts)), kind.length * len(experts)
            data = self._data(name, _Facts(kind.type_id, shape, length), kind.type_name, where)
            if data is not None:
                for expert in experts:
                    slice_ = _flat(data[expert : expert + 1])
                    self._bytes[family.layer, expert, kind.name] = slice_
            return {name}
        names = set()
        for expert in experts:
            projection = kind.name.removesuffix("_exps.weight")
            name = f"blk.{family.layer}.{projection}.{expert}.weight"
            names.add(name)
            facts = _Facts(kind.type_id, kind.shape, kind.length)
            data = self._data(name, facts, kind.type_name, where | {"expert": expert})
            if data is not None:
                self._bytes[family.layer, expert, kind.name] = _flat(data)
        return names

    def _data(self, name: str, facts: _Facts, type_name: str, where: Where) -> NDArray[Any] | None:
        """Return what a tensor holds; None where it is not what the index says that it is."""
        tensor = self._tensors.get(name)
        if tensor is None:
            if self._is_complete:
                self._find(f"gguf-py reads no {name} in the source", **where)
            return None
        if facts.type_id == tensor.facts.type_id and not self._has_right_size(facts.type_id):
            return None
        if facts != tensor.facts:
            self._find(f"it is {facts}; gguf-py reads {tensor.facts}", **where)
            return None
        theirs = GGMLQuantizationType(facts.type_id).name
        if type_name not in (theirs, f"type-{facts.type_id}"):
            self._find(f"its type is {type_name}; gguf-py reads {theirs}", **where)
        return tensor.data

    def _has_right_size(self, type_id: int) -> bool:
        """Hold the verifier's own block size against gguf-py's, once for each type."""
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
