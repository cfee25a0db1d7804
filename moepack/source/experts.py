"""The experts of a source: which tensors hold them, and where each expert's slices lie.

The tensor table decides; metadata only cross-checks it. A tensor is an expert tensor by exact name
and rank and last dimension (names: llama.cpp b11549, llama-arch.cpp); one that only looks like an
expert tensor is refused by name, never guessed. A number of experts that the metadata lacks, or
gives as something else, is unknown; if the tensors refute it, the source is at fault: no engine
runs such a model.
"""

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NoReturn

from moepack.common.errors import SourceError
from moepack.common.escaping import shell_word
from moepack.common.shape import CHUNK_FAMILY, ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.source import ggml_types
from moepack.source.shards import Source, SourceTensor
from moepack.source.tensor_table import split_rows

_VALUE_FAMILY = "attn_v_exps"
FAMILIES = (ROUTED_FAMILY, CHUNK_FAMILY, _VALUE_FAMILY)
MAX_EXPERTS = 1 << 16
MAX_LAYER = 1 << 16

_STACKED = re.compile(
    r"blk\.(?P<layer>\d{1,5})\."
    r"(?P<part>(?:ffn_(?:gate|up|down|gate_up)_(?P<family>(?:ch)?exps)|attn_v_exps)"
    r"\.(?P<suffix>weight|bias|scale|input_scale))\Z",
    re.ASCII,
)
_SCATTERED = re.compile(
    r"blk\.(?P<layer>\d{1,5})\.(?P<stem>ffn_(?:gate|up|down))\.(?P<expert>\d{1,5})\.weight\Z",
    re.ASCII,
)
# Arctic's norm: its name ends in `_exps`, and it is no expert's.
_LOOK_ALIKE = re.compile(r"blk\.\d+\.ffn_norm_exps\.weight\Z", re.ASCII)
_RANK = {"weight": 3, "bias": 2, "scale": 1, "input_scale": 1}


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One projection of a family in a layer, for all its experts.

    `name` is the tensor's without `blk.N.`; `shape` is one expert's in GGUF order; `length` is one
    slice's bytes. With an unknown type, `inferred`, the length follows from the gap. `places` are
    shards, and offsets from the start of these files: of the one tensor in which slices follow each
    other by `stride` bytes; if that is 0, of a tensor for each expert, as in Mixtral files from
    before April 2024.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    length: int
    inferred: bool
    places: tuple[tuple[int, int], ...]
    stride: int

    def at(self, expert: int) -> tuple[int, int]:
        """Return the shard of an expert's slice, and its offset from the start of that file."""
        if not self.stride:
            return self.places[expert]
        shard, offset = self.places[0]
        return shard, offset + expert * self.stride

    @property
    def is_weight(self) -> bool:
        """Whether this is a matrix, and not one of the small parts (bias, scale, input_scale)."""
        return self.name.endswith(".weight")


@dataclass(frozen=True, slots=True)
class SourceFamily:
    """The experts of one kind in one layer; `experts_used` is the number that a token uses."""

    layer: int
    name: str
    expert_count: int
    parts: tuple[SourcePart, ...]
    experts_used: int | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """All experts of a source: families ordered by layer, a layer's main one first."""

    families: tuple[SourceFamily, ...]
    names: frozenset[str]
    """The names of all expert tensors."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have experts, ascending."""
        return tuple(dict.fromkeys(family.layer for family in self.families))


def mtp_start(source: Source) -> int | None:
    """Return the first multi-token-prediction layer: block_count - nextn_predict_layers.

    llama.cpp leaves these layers out unless told otherwise (llama-model.cpp, `load_mtp`). None if
    the model has none: deepseek4 may state some and have none, and all of its blocks are run then
    (deepseek4.cpp, `load_arch_hparams`).
    """
    blocks = source.model_value("block_count")
    predicted = source.model_value("nextn_predict_layers")
    if type(blocks) is not int or type(predicted) is not int or not 0 < predicted < blocks:
        return None
    start = blocks - predicted
    first = f"blk.{start}.nextn.eh_proj.weight"
    if source.architecture == "deepseek4" and all(
        tensor.name != first for _, tensor in source.tensors()
    ):
        return None
    return start


def find_experts(source: Source, *, may_be_dense: bool = False) -> Experts:
    """Find the experts of a source; raises SourceError if it has none or they make no sense."""
    collector = _Collector(source)
    for tensor in source.tensors():
        collector.add(tensor)
    if may_be_dense and not collector.parts and not collector.scattered:
        return Experts((), frozenset())
    return collector.finish()


def shape_of(source: Source, experts: Experts) -> ModelShape:
    """Return the model's shape, as its tensors and its metadata state it."""
    families = []
    for family in experts.families:
        length = sum(part.length for part in family.parts)
        layer, name, count = family.layer, family.name, family.expert_count
        families.append(FamilyShape(layer, name, count, length, family.experts_used))
    dense = (tensor for _, tensor in source.tensors() if tensor.name not in experts.names)
    first_mtp = mtp_start(source)
    mtp_layers = (n for n in experts.layers if first_mtp is not None and n >= first_mtp)
    return ModelShape(tuple(families), sum(tensor.length for tensor in dense), tuple(mtp_layers))


class _Collector:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.parts: dict[tuple[int, str], dict[str, tuple[int, SourcePart]]] = defaultdict(dict)
        self.scattered: dict[tuple[int, str], dict[int, SourceTensor]] = defaultdict(dict)
        self.names: set[str] = set()

    def add(self, entry: SourceTensor) -> None:
        shard, tensor = entry
        if match := _STACKED.match(tensor.name):
            layer = int(match["layer"])
            family = f"ffn_{match['family']}" if match["family"] else _VALUE_FAMILY
            self.check_rank(entry, _RANK[match["suffix"]])
            expected, count = _stated_count(self.source, layer, family), tensor.dims[-1]
            if expected not in (None, count):
                problem = f"the last dimension is not the expert count of {family}"
                self.fail(entry, problem, expected, count)
            self.check_sliceable(entry, count)
            key, stride = (layer, family), tensor.length // count
            self.add_part(entry, key, match["part"], count, ((shard, tensor.offset),), stride)
        elif match := _SCATTERED.match(tensor.name):
            self.check_rank(entry, 2)
            self.check_sliceable(entry, 1)
            tensors = self.scattered[int(match["layer"]), f"{match['stem']}_exps.weight"]
            if int(match["expert"]) in tensors:
                self.fail(entry, "names an expert that another tensor names too")
            tensors[int(match["expert"])] = entry
            self.names.add(tensor.name)
        elif "exps" in tensor.name and not (
            len(tensor.dims) == 1 and _LOOK_ALIKE.match(tensor.name)
        ):
            self.fail(entry, "looks like an expert tensor of an unknown kind")

    def finish(self) -> Experts:
        for (layer, part), tensors in self.scattered.items():
            self.add_scattered(layer, part, tensors)
        if not self.parts:
            self.fail_dense()
        _check_mtp_layers(self.source)
        order = {name: number for number, name in enumerate(FAMILIES)}
        keys = sorted(self.parts, key=lambda key: (key[0], order[key[1]]))
        return Experts(tuple(self.family(*key) for key in keys), frozenset(self.names))

    def family(self, layer: int, name: str) -> SourceFamily:
        parts = dict(sorted(self.parts[layer, name].items()))
        counts = {count for count, _ in parts.values()}
        path, place = self.source.shards[0].path, f"layer {layer}, {name}"
        if len(counts) > 1:
            by_part = ", ".join(f"{part}: {count}" for part, (count, _) in parts.items())
            problem = "parts have other expert counts"
            raise SourceError(problem, path=path, place=place, found=by_part)
        stems = {part.partition("_exps")[0].partition("_chexps")[0] for part in parts}
        has_both = "ffn_down" in stems and stems & {"ffn_up", "ffn_gate_up"}
        if name != _VALUE_FAMILY and not has_both:
            problem, expected = "a projection is missing", "down, and up or gate_up"
            names = ", ".join(parts)
            raise SourceError(problem, path=path, place=place, expected=expected, found=names)
        count = counts.pop()
        used = _stated_used(self.source, layer, name, count)
        return SourceFamily(layer, name, count, tuple(part for _, part in parts.values()), used)

    def add_part(
        self,
        entry: SourceTensor,
        key: tuple[int, str],
        name: str,
        count: int,
        places: tuple[tuple[int, int], ...],
        stride: int = 0,
    ) -> None:
        layer, tensor = key[0], entry.tensor
        if layer > MAX_LAYER or not 1 <= count <= MAX_EXPERTS:
            self.fail(entry, f"layer or expert count out of bounds ({layer}, {count})")
        blocks = self.source.model_value("block_count")
        if type(blocks) is int and layer >= blocks:
            self.fail(entry, f"is beyond the model's block_count of {blocks}")
        if name in self.parts[key]:
            self.fail(entry, "stands beside one tensor for each expert")
        shape = tensor.dims[:-1] if stride else tensor.dims
        length, is_inferred = stride or tensor.length, tensor.inferred
        part = SourcePart(name, tensor.type_id, shape, length, is_inferred, places, stride)
        self.parts[key][name] = (count, part)
        self.names.add(tensor.name)

    def add_scattered(self, layer: int, part: str, tensors: dict[int, SourceTensor]) -> None:
        first = next(iter(tensors.values()))
        expected = _stated_count(self.source, layer, ROUTED_FAMILY) or max(tensors) + 1
        if len(tensors) != expected or max(tensors) != expected - 1:
            missing = (str(number) for number in range(expected) if number not in tensors)
            first_missing = ", ".join(itertools.islice(missing, 5))
            actual = f"no expert {first_missing}" if first_missing else f"{len(tensors)} experts"
            self.fail(first, "does not stand for each expert", f"0 to {expected - 1}", actual)
        for other in tensors.values():
            tensor = other.tensor
            if (tensor.type_id, tensor.dims) != (first.tensor.type_id, first.tensor.dims):
                self.fail(other, f"has another type or shape than {first.tensor.name}")
        in_order = (tensors[expert] for expert in range(expected))
        places = tuple((shard, tensor.offset) for shard, tensor in in_order)
        self.add_part(first, (layer, ROUTED_FAMILY), part, expected, places)

    def check_rank(self, entry: SourceTensor, rank: int) -> None:
        dims = entry.tensor.dims
        if len(dims) != rank:
            self.fail(entry, "wrong number of dimensions", rank, len(dims))
        if 0 in dims:
            self.fail(entry, "an empty tensor", None, dims)

    def check_sliceable(self, entry: SourceTensor, count: int) -> None:
        tensor = entry.tensor
        ggml_type = ggml_types.TYPES.get(tensor.type_id)
        name = ggml_types.type_name(tensor.type_id)
        if ggml_type is not None and ggml_type.tail_length:
            self.fail(entry, f"type {name} has one scale for all experts: no slices")
        if tensor.ambiguous:
            self.fail(entry, f"unknown {name}, and the gap leaves its length open")
        rows = split_rows(tensor.dims)[1] // count
        interleaved = ggml_type.interleaved_row_count if ggml_type else 1
        if interleaved > 1 and len(tensor.dims) > 1 and rows % interleaved:
            problem = f"rows of one expert are not whole groups of {name}"
            self.fail(entry, problem, f"a multiple of {interleaved}", rows)
        if tensor.length % count:
            expected = f"{count} equal slices"
            self.fail(entry, "does not divide into experts", expected, tensor.length)

    def fail_dense(self) -> NoReturn:
        first = self.source.shards[0]
        count = sum(len(shard.tensors) for shard in self.source.shards)
        problem = "a dense model: it has no expert tensors" if count else "a GGUF without tensors"
        hint = "without experts there is nothing to stream; llama.cpp runs it by itself:"
        hint += f" llama-server -m {shell_word(first.path)}"
        architecture = f"architecture {self.source.architecture or 'unknown'}"
        raise SourceError(problem, path=first.path, found=architecture, hint=hint)

    def fail(
        self, entry: SourceTensor, problem: str, expected: object = None, actual: object = None
    ) -> NoReturn:
        path, place = self.source.shards[entry.shard].path, f"tensor {entry.tensor.name!r}"
        raise SourceError(problem, path=path, place=place, expected=expected, found=actual)


def _stated_count(source: Source, layer: int, family: str) -> int | None:
    """Return the number of experts that the metadata states for a layer with some; not 0."""
    key = "attention.value_expert_count" if family == _VALUE_FAMILY else "expert_count"
    count = _value_of_layer(source, key, layer)
    if count is None:
        return None
    if count < 1:
        _fail_stated(
            source, key, f"layer {layer} has experts, and it states none", "1 or more", count
        )
    if family != CHUNK_FAMILY:
        return count
    group = source.model_value("experts_per_group")
    return count // group if type(group) is int and group > 0 else None


def _stated_used(source: Source, layer: int, family: str, expert_count: int) -> int | None:
    """Return the number of a family's `expert_count` experts that a token uses in a layer.

    Of chunk experts it is the most, since routed experts share them. None if the metadata does not
    state it. Raises SourceError if it states 0, or more than there are.
    """
    key = "attention.value_expert_used_count" if family == _VALUE_FAMILY else "expert_used_count"
    used = _value_of_layer(source, key, layer)
    if used is None:
        return None
    if family == CHUNK_FAMILY and used > 0:
        return min(used, expert_count)
    if not 1 <= used <= expert_count:
        problem = f"a token cannot use so many experts of layer {layer}"
        _fail_stated(source, key, problem, f"1 to {expert_count:,}", used)
    return used


def _check_mtp_layers(source: Source) -> None:
    """Raise SourceError if all layers or more are stated to be for multi-token prediction."""
    blocks = source.model_value("block_count")
    predicted = source.model_value("nextn_predict_layers")
    if type(blocks) is int and type(predicted) is int and not 0 <= predicted < blocks:
        problem = "not so many layers can be for multi-token prediction"
        _fail_stated(source, "nextn_predict_layers", problem, f"fewer than {blocks:,}", predicted)


def _value_of_layer(source: Source, key: str, layer: int) -> int | None:
    """Return a number of the metadata, which may have one for each layer."""
    value = source.model_value(key)
    if isinstance(value, tuple):
        value = value[layer] if layer < len(value) else None
    return value if type(value) is int else None


def _fail_stated(source: Source, key: str, problem: str, expected: str, actual: int) -> NoReturn:
    path, place = source.shards[0].path, f"key '{source.architecture}.{key}'"
    hint = "the metadata of this file is wrong, and no engine runs it: convert or download it again"
    raise SourceError(problem, path=path, place=place, expected=expected, found=actual, hint=hint)
