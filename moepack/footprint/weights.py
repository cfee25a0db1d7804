"""What the weights of a model take, layer by layer, and what of them one token reads.

It is the whole model that counts, as llama.cpp b11549 loads it: it does not run layers for
multi-token prediction, and leaves most of them where they are (llama-model.cpp, `nextn_flags`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from moepack.engines.source_header import source_of
from moepack.footprint import rules
from moepack.paths import PathOrPaths
from moepack.reading.directory import named_pack
from moepack.reading.pack import Pack
from moepack.shape import FamilyShape, ModelShape, is_row_table
from moepack.source.experts import Experts, find_experts, mtp_start, shape_of
from moepack.source.parameters import (
    EMBEDDINGS,
    OUTPUT,
    TOKEN_EMBEDDING,
    Parameters,
    count_parameters,
    layer_of,
)
from moepack.source.shards import Source, open_source
from moepack.source.tensor_table import Tensor, split_rows


class LayerWeights(NamedTuple):
    """The weights of one layer, in bytes.

    `dense_length` is of all tensors that are no routed expert's (attention, norms, router, shared
    experts); `expert_length` is of all experts of all families, `used_expert_length` of those that
    one token uses. None is what is not known.
    """

    layer: int
    dense_length: int | None
    expert_length: int
    used_expert_length: int | None


class OuterWeights(NamedTuple):
    """The weights that belong to no layer, in bytes.

    Of the embeddings a token reads one row each, `embedding_row_length` in all. The output is read
    for each token. Where `is_tied`, the token embedding is the output: its bytes are counted as
    both, though llama.cpp holds them twice only where the output lies on another device than the
    embeddings, which it keeps in main memory (llama-model-loader.cpp, TENSOR_DUPLICATED).
    """

    embedding_length: int
    embedding_row_length: int
    output_length: int
    is_tied: bool
    other_length: int

    @property
    def length(self) -> int:
        """What they take on one device, in bytes."""
        output_length = 0 if self.is_tied else self.output_length
        return self.embedding_length + output_length + self.other_length


class Weights(NamedTuple):
    """The weights of a model; lengths are bytes, and None is what is not known.

    `layers` are those that llama.cpp runs, by number, and `block_count` is how many those are;
    `mtp_length` is what the file has of those that it does not run; of some architectures it loads
    a part of them all the same, `loaded_mtp_length`. `shape` is of all layers.
    `table_length` is of row tables, which are left on the drive, wherever they stand; a token reads
    one row of each, `table_row_length` in all. `staged_length` is of the longest expert tensor: a
    GPU that computes prompts with experts from memory has room for a copy of it.
    Of a pack of experts alone only `shape`, and what experts take, is known.
    """

    architecture: str | None
    name: str | None
    block_count: int | None
    layers: tuple[LayerWeights, ...]
    outer: OuterWeights | None
    mtp_length: int | None
    loaded_mtp_length: int | None
    shape: ModelShape
    parameters: Parameters | None
    table_length: int = 0
    table_row_length: int = 0
    staged_length: int = 0

    @property
    def dense_length(self) -> int | None:
        """What all that is no expert takes on one device, but for row tables."""
        lengths = _sum(layer.dense_length for layer in self.layers)
        return None if lengths is None or self.outer is None else lengths + self.outer.length

    @property
    def expert_length(self) -> int:
        """What all experts take."""
        return sum(layer.expert_length for layer in self.layers)

    @property
    def length(self) -> int | None:
        """What llama.cpp loads on one device, and maps."""
        lengths = (self.dense_length, self.expert_length, self.loaded_mtp_length)
        return _sum((*lengths, self.table_length))

    @property
    def read_dense_length(self) -> int | None:
        """What one token reads that is no expert's: all layers, the output, rows of embeddings."""
        lengths, outer = _sum(layer.dense_length for layer in self.layers), self.outer
        if lengths is None or outer is None:
            return None
        rows = outer.embedding_row_length + self.table_row_length
        return lengths + rows + outer.output_length + outer.other_length

    @property
    def read_expert_length(self) -> int | None:
        """What one token reads of experts, in all layers together."""
        return _sum(layer.used_expert_length for layer in self.layers)


def weights_of(paths: PathOrPaths) -> Weights:
    """Return the weights of a model: of a source, or of what a pack was made of.

    `paths` is a pack's directory, or what `open_source` takes. Raises SourceError or PackError for
    what is at fault, RequestError for no path at all.
    """
    source = source_named(paths)
    if source is not None:
        return weights_of_source(source, find_experts(source))
    path = named_pack(paths)
    assert path is not None
    with Pack(path) as pack:
        return _of_experts(pack)


def source_named(paths: PathOrPaths) -> Source | None:
    """Return the source that is named, or that a pack was made of; None of a pack without it."""
    path = named_pack(paths)
    if path is None:
        return open_source(paths)
    with Pack(path) as pack:
        return source_of(pack) if pack.index.is_whole else None


def weights_of_source(source: Source, experts: Experts) -> Weights:
    """Return the weights of a source whose experts are found already."""
    shape = shape_of(source, experts)
    first_mtp = mtp_start(source)
    dense: Counter[int] = Counter()
    outside: dict[str, Tensor] = {}
    tables = [tensor for _, tensor in source.tensors() if is_row_table(tensor.name)]
    for _, tensor in source.tensors():
        layer = layer_of(tensor.name)
        if is_row_table(tensor.name):
            continue
        if layer is None:
            outside[tensor.name] = tensor
        elif tensor.name not in experts.names:
            dense[layer] += tensor.length
    families = _by_layer(shape)
    numbers = sorted({*dense, *families})
    layers = tuple(_layer(number, dense[number], families.get(number, ())) for number in numbers)
    run = tuple(held for held in layers if first_mtp is None or held.layer < first_mtp)
    left_out = layers[len(run) :]
    blocks = source.model_value("block_count")
    name = source.value("general.name")
    return Weights(
        architecture=source.architecture or None,
        name=name if isinstance(name, str) else None,
        block_count=first_mtp or (blocks if type(blocks) is int else None),
        layers=run,
        outer=_outer(outside),
        mtp_length=sum(held.expert_length + (held.dense_length or 0) for held in left_out),
        loaded_mtp_length=_loaded_of_mtp(source, {held.layer for held in left_out}),
        shape=shape,
        parameters=count_parameters(source, experts, shape),
        table_length=sum(table.length for table in tables),
        table_row_length=sum(map(_row_length, tables)),
        staged_length=max(
            (
                part.length * family.expert_count
                for family in experts.families
                for part in family.parts
            ),
            default=0,
        ),
    )


def _of_experts(pack: Pack) -> Weights:
    """Return what is known of a model by a pack of its experts alone."""
    shape = pack.shape
    families = _by_layer(shape.without_mtp())
    stated = pack.manifest.source
    return Weights(
        architecture=stated.architecture or None,
        name=stated.name,
        block_count=None,
        layers=tuple(_layer(layer, None, held) for layer, held in families.items()),
        outer=None,
        mtp_length=None,
        loaded_mtp_length=None,
        shape=shape,
        parameters=None,
    )


def _by_layer(shape: ModelShape) -> dict[int, tuple[FamilyShape, ...]]:
    return {
        layer: tuple(family for family in shape.families if family.layer == layer)
        for layer in shape.layers
    }


def _layer(
    number: int, dense_length: int | None, families: tuple[FamilyShape, ...]
) -> LayerWeights:
    return LayerWeights(
        number,
        dense_length,
        sum(family.expert_count * family.expert_length for family in families),
        _sum(map(_used_length, families)),
    )


def _used_length(family: FamilyShape) -> int | None:
    if family.experts_used is None:
        return None
    return min(family.experts_used, family.expert_count) * family.expert_length


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
    """Sort the tensors outside all layers by what a token reads of them."""
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
    """Add up; what is not known makes the sum unknown."""
    known = list(lengths)
    return None if None in known else sum(length for length in known if length is not None)
