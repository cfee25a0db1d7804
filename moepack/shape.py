"""The shape of a model: which layers have experts, how many, of how many bytes.

It is the same type wherever the facts come from: a source or a pack. Whoever needs
them (a trace that is checked, a report, a simulation) takes a shape and asks nothing else.
"""

import re
from collections.abc import Collection
from typing import NamedTuple, Self

ROUTED_FAMILY = "ffn_exps"
"""The family that a layer's router chooses from: its experts are what traces name."""
CHUNK_FAMILY = "ffn_chexps"
"""Experts that groups of the routed ones share: number C serves C * G to C * G + G - 1."""
_ROW_TABLE = re.compile(r"(per_layer_token_embd|blk\.\d+\.engram_embd)\.weight")


class FamilyShape(NamedTuple):
    """The experts of one kind in one layer.

    `expert_length` is the bytes of one expert's parts, without padding. `experts_used` is how many
    of them a token uses, None where that is not known.
    """

    layer: int
    name: str
    expert_count: int
    expert_length: int
    experts_used: int | None = None


class ModelShape(NamedTuple):
    """All families of experts of a model, ordered by layer, a layer's main one first.

    `dense_length` is the bytes of all tensors that are no expert's, None where that is not known.
    `mtp_layers` are those for multi-token prediction, which llama.cpp leaves out.
    """

    families: tuple[FamilyShape, ...]
    dense_length: int | None = None
    mtp_layers: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have experts of any family, ascending."""
        return tuple(dict.fromkeys(family.layer for family in self.families))

    @property
    def routed(self) -> dict[int, FamilyShape]:
        """By layer, the family that its router chooses from."""
        return {family.layer: family for family in self.families if family.name == ROUTED_FAMILY}

    @property
    def expert_counts(self) -> dict[int, int]:
        """By layer, how many experts its router chooses from."""
        return {layer: family.expert_count for layer, family in self.routed.items()}

    @property
    def chunk_sizes(self) -> dict[int, int]:
        """By layer, how many experts share one chunk expert, where they divide evenly."""
        counts = self.expert_counts
        return {
            family.layer: counts[family.layer] // family.expert_count
            for family in self.families
            if family.name == CHUNK_FAMILY
            and counts.get(family.layer, 0)
            and counts[family.layer] % family.expert_count == 0
        }

    @property
    def experts_used(self) -> int | None:
        """How many experts a token uses in a layer, the most of any; None where it is not known."""
        return max((family.experts_used or 0 for family in self.routed.values()), default=0) or None

    @property
    def expert_length(self) -> int:
        """The bytes of all experts of all families."""
        return sum(family.expert_count * family.expert_length for family in self.families)

    @property
    def routed_count(self) -> int:
        """How many experts routers choose from, in all layers."""
        return sum(family.expert_count for family in self.routed.values())

    @property
    def routed_length(self) -> int:
        """The bytes of all experts that routers choose from."""
        routed = self.routed.values()
        return sum(family.expert_count * family.expert_length for family in routed)

    def without_mtp(self) -> Self:
        """Return the shape of what llama.cpp runs."""
        families = (family for family in self.families if family.layer not in self.mtp_layers)
        return self._replace(families=tuple(families), mtp_layers=())

    def of_layers(self, layers: Collection[int]) -> Self:
        """Return the shape of some layers alone."""
        families = (family for family in self.families if family.layer in layers)
        return self._replace(families=tuple(families))

    def __str__(self) -> str:
        """Say in a few words what a router may choose."""
        counts = self.expert_counts
        if not counts:
            return "no layers with experts"
        return f"layers {min(counts)} to {max(counts)}, up to {max(counts.values())} experts"


def is_row_table(name: str) -> bool:
    """Return whether a tensor is a table of rows for n-grams or layers, of which a token reads few.

    Such tables are longer than all that is dense, and are left on the drive: llama.cpp maps them
    (`--lazy-mode`). Their rows follow from the tokens alone.
    """
    return _ROW_TABLE.fullmatch(name) is not None
