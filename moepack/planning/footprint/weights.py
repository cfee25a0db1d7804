"""The bytes of a model's weights, layer by layer, and the bytes that one token reads.

The whole model counts, as llama.cpp b11549 loads it: it does not run layers for
multi-token prediction, and leaves most of them on the drive (llama-model.cpp, `nextn_flags`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from moepack.common.shape import ModelShape, is_row_table
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint import rules
from moepack.source.experts import Experts, mtp_start, shape_of
from moepack.source.parameters import (
    EMBEDDINGS,
    OUTPUT,
    TOKEN_EMBEDDING,
    Parameters,
    count_parameters,
    layer_of,
)
from moepack.source.shards import Source
from moepack.source.tensor_table import Tensor, split_rows


class LayerWeights(NamedTuple):
    """The weights of one layer, in bytes.

    `dense_length` is of all tensors but routed experts (attention, norms, router, shared experts);
    `expert_length` is of all experts of all families, of which a token uses `used_expert_length`.
    None is unknown.
    """

    layer: int
    dense_length: int | None
    expert_length: int
    used_expert_length: int | None


class OuterWeights(NamedTuple):
    """The weights that belong to no layer, in bytes.

    Of the embeddings a token reads one row each, `embedding_row_length` in all. The output is read
    for each token. If `is_tied`, the token embedding is the output: its bytes are counted as both,
    though llama.cpp has them twice only if the output lies on another device than the embeddings,
    which it keeps in main memory (llama-model-loader.cpp, TENSOR_DUPLICATED).
    """

    embedding_length: int
    embedding_row_length: int
    output_length: int
    is_tied: bool
    other_length: int

    @property
    def length(self) -> int:
        """The bytes they take on one device."""
        output_length = 0 if self.is_tied else self.output_length
        return self.embedding_length + output_length + self.other_length


class Weights(NamedTuple):
    """The weights of a model; lengths are bytes, and None is unknown.

    `layers` are the `block_count` layers that llama.cpp runs, by number; of the others in the file
    it loads `loaded_mtp_length` for some architectures all the same.
    `shape` is of all layers. `table_length` is of row tables, which are left on the drive; a token
    reads one row of each, `table_row_length` in all. `staged_length` is of the longest expert
    tensor: a GPU that computes prompts with experts from memory has room for a copy of it. Of a
    pack of experts alone only `shape`, and the bytes of experts, are known.
    """

    block_count: int | None
    layers: tuple[LayerWeights, ...]
    outer: OuterWeights | None
    loaded_mtp_length: int | None
    shape: ModelShape
    parameters: Parameters | None
    table_length: int = 0
    table_row_length: int = 0
    staged_length: int = 0

    @property
    def dense_length(self) -> int | None:
        """The bytes of dense weights on one device, but for row tables."""
        lengths = _sum(layer.dense_length for layer in self.layers)
        return None if lengths is None or self.outer is None else lengths + self.outer.length

    @property
    def expert_length(self) -> int:
        """The bytes of all experts."""
        return sum(layer.expert_length for layer in self.layers)

    @property
    def length(self) -> int | None:
        """The bytes that llama.cpp loads on one device, and maps."""
        lengths = (self.dense_length, self.expert_length, self.loaded_mtp_length)
        return _sum((*lengths, self.table_length))

    @property
    def read_dense_length(self) -> int | None:
        """The dense bytes that a token reads: all layers, the output, rows of embeddings."""
        lengths, outer = _sum(layer.dense_length for layer in self.layers), self.outer
        if lengths is None or outer is None:
            return None
        rows = outer.embedding_row_length + self.table_row_length
        return lengths + rows + outer.output_length + outer.other_length

    @property
    def read_expert_length(self) -> int | None:
        """The bytes of experts that a token reads, in all layers together."""
        return _sum(layer.used_expert_length for layer in self.layers)


def weights_of_source(source: Source, experts: Experts) -> Weights:
    """Return the weights of a source with its `experts`."""
    shape, first_mtp = shape_of(source, experts), mtp_start(source)
    dense: Counter[int] = Counter()
    outside: dict[str, Tensor] = {}
    tables = []
    for _, tensor in source.tensors():
        layer = layer_of(tensor.name)
        if is_row_table(tensor.name):
            tables.append(tensor)
        elif layer is None:
            outside[tensor.name] = tensor
        elif tensor.name not in experts.names:
            dense[layer] += tensor.length
    lengths = (
        part.length * family.expert_count for family in experts.families for part in family.parts
    )
    layers = _layers(shape, dense)
    run = tuple(one for one in layers if first_mtp is None or one.layer < first_mtp)
    blocks = source.model_value("block_count")
    return Weights(
        block_count=first_mtp or (blocks if type(blocks) is int else None),
        layers=run,
        outer=_outer(outside),
        loaded_mtp_length=_loaded_of_mtp(source, {one.layer for one in layers[len(run) :]}),
        shape=shape,
        parameters=count_parameters(source, experts, shape),
        table_length=sum(table.length for table in tables),
        table_row_length=sum(map(_row_length, tables)),
        staged_length=max(lengths, default=0),
    )


def weights_of_experts(pack: Pack) -> Weights:
    """Return the weights that a pack of experts alone tells of."""
    layers = _layers(pack.shape.without_mtp(), None)
    return Weights(None, layers, None, None, pack.shape, None)


def _layers(shape: ModelShape, dense: Mapping[int, int] | None) -> tuple[LayerWeights, ...]:
    """Return the weights of all layers; `dense` are the bytes of each, None if not known."""
    layers = []
    for number in sorted({*shape.layers, *(dense or ())}):
        families = [family for family in shape.families if family.layer == number]
        used = _sum(
            None
            if family.experts_used is None
            else min(family.experts_used, family.expert_count) * family.expert_length
            for family in families
        )
        length = sum(family.expert_count * family.expert_length for family in families)
        dense_length = None if dense is None else dense.get(number, 0)
        layers.append(LayerWeights(number, dense_length, length, used))
    return tuple(layers)


def _loaded_of_mtp(source: Source, layers: set[int]) -> int:
    """Return the bytes that llama.cpp loads of layers that it does not run."""
    loaded = rules.LOADED_OF_MTP.get(source.architecture)
    return sum(
        tensor.length
        for _, tensor in source.tensors()
        if loaded is not None
        and layer_of(tensor.name) in layers
        and loaded.match(tensor.name.split(".", 2)[2])
    )


def _outer(tensors: dict[str, Tensor]) -> OuterWeights:
    embeddings = [tensors[name] for name in EMBEDDINGS if name in tensors]
    is_tied = OUTPUT not in tensors
    output = tensors.get(TOKEN_EMBEDDING if is_tied else OUTPUT)
    others = tensors.keys() - {OUTPUT, *EMBEDDINGS}
    return OuterWeights(
        embedding_length=sum(tensor.length for tensor in embeddings),
        embedding_row_length=sum(map(_row_length, embeddings)),
        output_length=0 if output is None else output.length,
        is_tied=is_tied,
        other_length=sum(tensors[name].length for name in others),
    )


def _row_length(tensor: Tensor) -> int:
    return tensor.length // max(1, split_rows(tensor.dims)[1])


def _sum(lengths: Iterable[int | None]) -> int | None:
    """Sum up lengths; None if any is unknown."""
    listed = list(lengths)
    return None if None in listed else sum(length or 0 for length in listed)
