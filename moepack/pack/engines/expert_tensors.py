"""The expert tensors of a pack by layer and projection, as the formats of other engines name them.

Other engines know the routed experts' weights alone (`blk.N.ffn_gate_exps.weight` and its like);
biases, scales and other families of experts they read from the GGUF.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from moepack.common.escaping import shell_word
from moepack.common.sizes import ranges_text
from moepack.pack.engines.contract import Need, Settings
from moepack.pack.format.names import projection
from moepack.pack.format.tables import PackedFamily, PartKind
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import part_extent
from moepack.storage.extents import Extent

ROLES = ("gate", "up", "down")
FAMILY = "ffn_exps"


class ExpertTensor(NamedTuple):
    """One part of all experts of a layer, most a weight: the part `number` of `family`."""

    pack: Pack
    family: PackedFamily
    number: int

    @property
    def kind(self) -> PartKind:
        """Its type, shape and length, of one expert."""
        return self.family.part_kinds[self.number]

    @property
    def name(self) -> str:
        """The name of the tensor in a GGUF."""
        return f"blk.{self.family.layer}.{self.kind.name}"

    @property
    def length(self) -> int:
        """The bytes of one expert."""
        return self.kind.length

    @property
    def expert_count(self) -> int:
        """The number of experts."""
        return self.family.expert_count

    def extent(self, expert: int, offset: int) -> Extent:
        """Return an expert's bytes in the files of the index, at `offset` of a new file."""
        return part_extent(self.pack.index, self.family, expert, self.number, offset)

    def extents(self) -> Iterator[Extent]:
        """Yield the bytes of all experts, for a file that is this tensor."""
        for expert in range(self.expert_count):
            yield self.extent(expert, expert * self.length)


Layer = Mapping[str, ExpertTensor]
"""The expert tensors of a layer by projection: gate, up, down, gate_up."""


def expert_tensors(pack: Pack) -> dict[int, Layer]:
    """Return the weights of the routed experts by layer, in order, and projection."""
    layers: dict[int, Layer] = {}
    for family in pack.index.families:
        if family.name == FAMILY:
            layers[family.layer] = {
                projection(kind.name): ExpertTensor(pack, family, number)
                for number, kind in enumerate(family.part_kinds)
                if kind.name.endswith(".weight")
            }
    return layers


def needed_stacks(layers: Mapping[int, Layer]) -> Iterator[Need]:
    """Yield the need for routed experts, and those of a layer in one tensor."""
    if not layers:
        yield Need("it needs routed experts, which the pack lacks")
    if any(tensor.kind.origin.first_slice is not None for tensor in tensors_of(layers)):
        problem = "it needs the experts of a layer in one tensor: the GGUF has a tensor for each"
        yield Need(problem, "convert the model again, with a llama.cpp from after April 2024")


def needed_weights(pack: Pack, _settings: Settings) -> Iterator[Need]:
    """Yield the needs of an engine that takes any weights of experts, if it has those of all."""
    yield from needed_stacks(expert_tensors(pack))
    yield from needed_all_layers(pack)


def needed_roles(layers: Mapping[int, Layer]) -> Iterator[Need]:
    """Yield the need for gate, up and down in each layer, in tensors of their own."""
    yield from needed_stacks(layers)
    fused = [number for number, layer in layers.items() if "gate_up" in layer]
    if fused:
        yield Need(f"it needs gate and up apart: layers {ranges_text(fused)} have them in one")
    others = [
        number for number, layer in layers.items() if number not in fused and {*layer} != {*ROLES}
    ]
    if others:
        roles = " and ".join(layers[others[0]])
        yield Need(f"it needs gate, up and down: layers {ranges_text(others)} have {roles}")


def needed_all_layers(pack: Pack) -> Iterator[Need]:
    """Yield the need for all layers of the model, if the pack was made of some."""
    if pack.manifest.layers is not None:
        problem = f"it needs all layers: the pack has {ranges_text(pack.manifest.layers)}"
        yield Need(problem, pack_command(pack))


def tensors_of(layers: Mapping[int, Layer]) -> list[ExpertTensor]:
    """List all expert tensors."""
    return [tensor for layer in layers.values() for tensor in layer.values()]


def expert_count(layer: Layer) -> int:
    """Return the number of experts of a layer."""
    return next(iter(layer.values())).expert_count


def pack_command(pack: Pack, *options: str) -> str:
    """Return the command that packs the source again, with other options."""
    source = shell_word(pack.manifest.source.shards[0].name)
    return " ".join(("moepack pack", source, *options, "-o new.moepack"))


def architecture_note(pack: Pack, title: str, architectures: Sequence[str]) -> tuple[str, ...]:
    """Return a note if an engine is not known to run the model's architecture."""
    architecture = pack.manifest.source.architecture
    if architecture in architectures:
        return ()
    return (f"{title} runs {', '.join(architectures)} with it; this model is {architecture}",)
