"""The experts of a source: which tensors hold them, and where each expert's slices lie.

The tensor table decides; metadata only cross-checks it. A tensor is an expert tensor by exact name
and rank and last dimension (names: llama.cpp b11549, llama-arch.cpp); one that looks like an expert
tensor and is none that is known is refused by name, never guessed.
"""

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from moepack.errors import SourceError
from moepack.escaping import shell_word
from moepack.shape import FamilyShape, ModelShape
from moepack.source import ggml_types, stated
from moepack.source.shards import Source
from moepack.source.tensor_table import Tensor, split_rows

FAMILIES = ("ffn_exps", "ffn_chexps", "attn_v_exps")
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
_LOOK_ALIKE = re.compile(r"blk\.\d+\.ffn_norm_exps\.weight\Z", re.ASCII)
_RANK = {"weight": 3, "bias": 2, "scale": 1, "input_scale": 1}


class SlicePlace(NamedTuple):
    """Where a slice begins: the number of its shard, and the offset from the start of that file."""

    shard: int
    offset: int


@dataclass(frozen=True, slots=True)
class Stacked:
    """Slices that follow each other in one tensor: expert E starts at offset + E * length."""

    shard: int
    offset: int
    length: int

    def at(self, expert: int) -> SlicePlace:
        """Return where an expert's slice begins."""
        return SlicePlace(self.shard, self.offset + expert * self.length)


@dataclass(frozen=True, slots=True)
class Scattered:
    """Slices that are a tensor each, as in Mixtral files from before April 2024."""

    places: tuple[SlicePlace, ...]

    def at(self, expert: int) -> SlicePlace:
        """Return where an expert's slice begins."""
        return self.places[expert]


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One projection of a family in a layer, for all its experts.

    `name` is the tensor's without `blk.N.`; `shape` is one expert's in GGUF order; `length` is one
    slice's bytes. `inferred` says that the type is unknown and the gap proved the length.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    length: int
    inferred: bool
    slices: Stacked | Scattered

    @property
    def is_weight(self) -> bool:
        """Whether this is a matrix, and not one of the small parts (bias, scale, input_scale)."""
        return self.name.endswith(".weight")


@dataclass(frozen=True, slots=True)
class SourceFamily:
    """The experts of one kind in one layer.

    `experts_used` is how many of them a token uses, None where the metadata does not state it.
    """

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

    llama.cpp leaves these layers out unless asked (llama-model.cpp, `load_mtp`). None where the
    model has none: deepseek4 may state some and have none, and all of its blocks are run then
    (deepseek4.cpp, `load_arch_hparams`).
    """
    blocks, predicted = (
        source.model_value("block_count"),
        source.model_value("nextn_predict_layers"),
    )
    if type(blocks) is not int or type(predicted) is not int or not 0 < predicted < blocks:
        return None
    start = blocks - predicted
    first = f"blk.{start}.nextn.eh_proj.weight"
    if source.architecture == "deepseek4" and all(
        tensor.name != first for _, tensor in source.tensors()
    ):
        return None
    return start


def find_experts(source: Source) -> Experts:
    """Find the experts of a source; raise SourceError where it has none or they make no sense."""
    collector = _Collector(source)
    for shard, tensor in source.tensors():
        collector.add(shard, tensor)
    return collector.finish()


def shape_of(source: Source, experts: Experts) -> ModelShape:
    """Return the model's shape, as its tensors and its metadata state it."""
    mtp_layer = mtp_start(source)
    return ModelShape(
        families=tuple(
            FamilyShape(
                layer=family.layer,
                name=family.name,
                expert_count=family.expert_count,
                expert_length=sum(part.length for part in family.parts),
                experts_used=family.experts_used,
            )
            for family in experts.families
        ),
        dense_length=sum(
            tensor.length for _, tensor in source.tensors() if tensor.name not in experts.names
        ),
        mtp_layers=tuple(
            layer for layer in experts.layers if mtp_layer is not None and layer >= mtp_layer
        ),
    )


class _Collector:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.parts: dict[tuple[int, str], dict[str, tuple[int, SourcePart]]] = defaultdict(dict)
        self.scattered: dict[tuple[int, str], dict[int, tuple[int, Tensor]]] = defaultdict(dict)
        self.names: set[str] = set()

    def add(self, shard: int, tensor: Tensor) -> None:
        if match := _STACKED.match(tensor.name):
            layer, family = int(match["layer"]), f"ffn_{match['family']}"
            if match["family"] is None:
                family = "attn_v_exps"
            self.check_rank(shard, tensor, _RANK[match["suffix"]])
            self.check_count(shard, tensor, layer, family)
            count = tensor.dims[-1]
            self.check_sliceable(shard, tensor, count)
            slices = Stacked(shard, tensor.offset, tensor.length // count)
            self.add_part(shard, tensor, layer, family, match["part"], count, slices)
        elif match := _SCATTERED.match(tensor.name):
            self.check_rank(shard, tensor, 2)
            self.check_sliceable(shard, tensor, 1)
            held = self.scattered[int(match["layer"]), f"{match['stem']}_exps.weight"]
            if int(match["expert"]) in held:
                self.fail(shard, tensor, "names an expert that another tensor names too")
            held[int(match["expert"])] = (shard, tensor)
            self.names.add(tensor.name)
        elif "exps" in tensor.name and not self.is_look_alike(tensor):
            self.fail(shard, tensor, "looks like an expert tensor of a kind that is not known")

    def finish(self) -> Experts:
        for (layer, part), tensors in self.scattered.items():
            self.add_scattered(layer, part, tensors)
        if not self.parts:
            self.fail_dense()
        stated.check_mtp_layers(self.source)
        order = {name: number for number, name in enumerate(FAMILIES)}
        keys = sorted(self.parts, key=lambda key: (key[0], order[key[1]]))
        return Experts(tuple(self.family(*key) for key in keys), frozenset(self.names))

    def family(self, layer: int, name: str) -> SourceFamily:
        held = self.parts[layer, name]
        counts = {count for count, _ in held.values()}
        place = f"layer {layer}, {name}"
        path = self.source.shards[0].path
        if len(counts) > 1:
            found = ", ".join(f"{part}: {count}" for part, (count, _) in sorted(held.items()))
            raise SourceError("parts have other expert counts", path=path, place=place, found=found)
        stems = {part.partition("_exps")[0].partition("_chexps")[0] for part in held}
        if name != "attn_v_exps" and not (
            "ffn_down" in stems and stems & {"ffn_up", "ffn_gate_up"}
        ):
            raise SourceError(
                "a projection is missing",
                path=path,
                place=place,
                expected="down, and up or gate_up",
                found=", ".join(sorted(held)),
            )
        parts = tuple(part for _, (_, part) in sorted(held.items()))
        count = counts.pop()
        used = stated.experts_used(self.source, layer, name, count)
        return SourceFamily(layer, name, count, parts, used)

    def add_part(
        self,
        shard: int,
        tensor: Tensor,
        layer: int,
        family: str,
        name: str,
        count: int,
        slices: Stacked | Scattered,
    ) -> None:
        if layer > MAX_LAYER or not 1 <= count <= MAX_EXPERTS:
            self.fail(shard, tensor, f"layer or expert count out of bounds ({layer}, {count})")
        blocks = self.source.model_value("block_count")
        if type(blocks) is int and layer >= blocks:
            self.fail(shard, tensor, f"lies past the model's block_count of {blocks}")
        if name in self.parts[layer, family]:
            self.fail(shard, tensor, "stands beside one tensor for each expert")
        shape = tensor.dims[:-1] if isinstance(slices, Stacked) else tensor.dims
        length = slices.length if isinstance(slices, Stacked) else tensor.length
        part = SourcePart(name, tensor.type_id, shape, length, tensor.inferred, slices)
        self.parts[layer, family][name] = (count, part)
        self.names.add(tensor.name)

    def add_scattered(self, layer: int, part: str, tensors: dict[int, tuple[int, Tensor]]) -> None:
        shard, first = next(iter(tensors.values()))
        expected = stated.expert_count(self.source, layer, "ffn_exps") or max(tensors) + 1
        if len(tensors) != expected or max(tensors) != expected - 1:
            missing = (str(number) for number in range(expected) if number not in tensors)
            first_missing = ", ".join(itertools.islice(missing, 5))
            found = f"no expert {first_missing}" if first_missing else f"{len(tensors)} experts"
            self.fail(shard, first, "does not stand for each expert", f"0 to {expected - 1}", found)
        for shard, tensor in tensors.values():
            if (tensor.type_id, tensor.dims) != (first.type_id, first.dims):
                self.fail(shard, tensor, f"has another type or shape than {first.name}")
        places = tuple(
            SlicePlace(tensors[expert][0], tensors[expert][1].offset) for expert in range(expected)
        )
        self.add_part(shard, first, layer, "ffn_exps", part, expected, Scattered(places))

    def check_rank(self, shard: int, tensor: Tensor, rank: int) -> None:
        if len(tensor.dims) != rank:
            self.fail(shard, tensor, "wrong number of dimensions", rank, len(tensor.dims))
        if 0 in tensor.dims:
            self.fail(shard, tensor, "an empty tensor", found=tensor.dims)

    def check_count(self, shard: int, tensor: Tensor, layer: int, family: str) -> None:
        expected = stated.expert_count(self.source, layer, family)
        if expected is not None and tensor.dims[-1] != expected:
            problem = f"the last dimension is not the expert count of {family}"
            self.fail(shard, tensor, problem, expected, tensor.dims[-1])

    def check_sliceable(self, shard: int, tensor: Tensor, count: int) -> None:
        known = ggml_types.TYPES.get(tensor.type_id)
        if known is not None and not known.sliceable:
            self.fail(shard, tensor, f"type {known.name} has one scale for all experts: no slices")
        if tensor.ambiguous:
            name = ggml_types.type_name(tensor.type_id)
            self.fail(shard, tensor, f"unknown {name}, and the gap leaves its length open")
        _, row_count = split_rows(tensor.dims)
        interleaved = known.interleaved_row_count if known else 1
        if interleaved > 1 and len(tensor.dims) > 1 and row_count // count % interleaved:
            name = ggml_types.type_name(tensor.type_id)
            problem = f"rows of one expert are not whole groups of {name}"
            self.fail(shard, tensor, problem, f"a multiple of {interleaved}", row_count // count)
        if tensor.length % count:
            self.fail(
                shard,
                tensor,
                "does not divide into experts",
                f"{count} equal slices",
                tensor.length,
            )

    def is_look_alike(self, tensor: Tensor) -> bool:
        """Say whether this is arctic's norm: its name ends in `_exps`, it is no expert's."""
        return len(tensor.dims) == 1 and bool(_LOOK_ALIKE.match(tensor.name))

    def fail_dense(self) -> NoReturn:
        first = self.source.shards[0]
        count = sum(len(shard.tensors) for shard in self.source.shards)
        problem = "a dense model: it has no expert tensors" if count else "a GGUF without tensors"
        hint = "without experts there is nothing to stream; llama.cpp runs it by itself:"
        hint += f" llama-server -m {shell_word(first.path)}"
        architecture = f"architecture {self.source.architecture or 'unknown'}"
        raise SourceError(problem, path=first.path, found=architecture, hint=hint)

    def fail(
        self,
        shard: int,
        tensor: Tensor,
        problem: str,
        expected: object = None,
        found: object = None,
    ) -> NoReturn:
        raise SourceError(
            problem,
            path=self.source.shards[shard].path,
            place=f"tensor {tensor.name!r}",
            expected=expected,
            found=found,
        )
