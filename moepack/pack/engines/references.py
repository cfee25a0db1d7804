"""References of exports: a pack as readers read it, or a source as the verifier does.

Neither way knows what writes exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from moepack.common.errors import SourceError
from moepack.common.paths import AnyPath
from moepack.pack.engines.contract import ExpectedPart, ExpectedTensor, ExportedSlice
from moepack.pack.opening.source_header import read_first_header
from moepack.pack.reading.pack import Pack
from moepack.pack.verifying.witness import PartKey, Witness
from moepack.source import gguf_header
from moepack.storage.inputs import Inputs


def metadata_in(path: AnyPath) -> dict[str, bytes]:
    """Return the metadata of a GGUF: each key with its bytes, type and value included."""
    pairs = gguf_header.read(path).pairs
    end = max((end for _, end in pairs.values()), default=0)
    with Inputs([path], SourceError) as inputs:
        data = inputs.read(0, 0, end)
    return {key: data[start:end] for key, (start, end) in pairs.items()}


Read = Callable[[ExportedSlice], "bytes | memoryview"]


class PackReference(NamedTuple):
    """An open pack."""

    pack: Pack
    name: str = "the pack"

    def parts(self) -> list[ExpectedPart]:
        """List all parts of experts by layer."""
        return [
            ExpectedPart(
                layer,
                kind.name,
                self.pack.expert_count(layer, family=family),
                kind.length,
                kind.type_id,
                kind.shape,
            )
            for layer in self.pack.layers
            for family in self.pack.families(layer)
            for kind in self.pack.parts(layer, family=family)
        ]

    def dense(self) -> list[ExpectedTensor]:
        """List the dense tensors that are not empty."""
        return [
            ExpectedTensor(one.name, one.length, one.type_id, one.shape)
            for one in self.pack.dense()
            if one.length
        ]

    def metadata(self) -> dict[str, bytes]:
        """Return the metadata of the first shard, by key."""
        data, header = read_first_header(self.pack)
        return {key: bytes(data[start:end]) for key, (start, end) in header.pairs.items()}

    @contextmanager
    def open(self) -> Iterator[Read]:
        """Give a function that reads slices, with their digests checked."""
        with self.pack.reader(backend="buffered") as reader:

            def read(one: ExportedSlice) -> memoryview:
                if one.layer is None or one.expert is None:
                    return reader.read_dense(one.part)
                return reader.read(one.layer, one.expert, one.part)

            yield read


class SourceReference(NamedTuple):
    """The shards of a source, as the verifier's own witness walked them."""

    witness: Witness
    name: str = "the source"

    def parts(self) -> list[ExpectedPart]:
        """List all parts of experts by layer."""
        return [
            ExpectedPart(
                key.layer, key.part, len(part.starts), part.length, part.type_id, part.shape
            )
            for key, part in sorted(self.witness.parts.items())
        ]

    def dense(self) -> list[ExpectedTensor]:
        """List the dense tensors that are not empty."""
        return [
            ExpectedTensor(one.name, one.length, one.type_id, one.shape)
            for one in self.witness.dense.values()
            if one.length
        ]

    def metadata(self) -> dict[str, bytes]:
        """Return the metadata of the first shard, by key."""
        return metadata_in(self.witness.shards[0].path)

    @contextmanager
    def open(self) -> Iterator[Read]:
        """Give a function that reads slices from the shards."""
        with Inputs([shard.path for shard in self.witness.shards], SourceError) as inputs:

            def read(one: ExportedSlice) -> bytes:
                if one.layer is None or one.expert is None:
                    tensor = self.witness.dense[one.part]
                    return inputs.read(tensor.shard, tensor.start, tensor.length)
                part = self.witness.parts[PartKey(one.layer, one.part)]
                return inputs.read(part.shards[one.expert], part.starts[one.expert], part.length)

            yield read


Reference = PackReference | SourceReference
"""The model to compare with; its `name` is for people."""
