"""The shape of a model: which layers have experts, how many, of how many bytes.

It is the same type for a source and for a pack. Checks of traces, reports and simulations need
nothing else of a model.
"""

import re
from collections.abc import Collection
from typing import NamedTuple, Self

ROUTED_FAMILY = "ffn_exps"
"""The family that a layer's router routes to: traces name its experts."""
CHUNK_FAMILY = "ffn_chexps"
"""Experts that groups of the routed ones share: number C serves C * G to C * G + G - 1."""
_ROW_TABLE = re.compile(r"(per_layer_token_embd|blk\.\d+\.engram_embd)\.weight")


class ExpertKey(NamedTuple):
    """An expert by its layer (the N of `blk.N.`) and its number there, which is the router's."""

    layer: int
    expert: int


class FamilyShape(NamedTuple):
    """The experts of one kind in one layer.

    `expert_length` is the bytes of one expert's parts, without padding. `experts_used` is how many
    of them a token uses, None if unknown.
    """

    layer: int
    name: str
    expert_count: int
    expert_length: int
    experts_used: int | None = None


class ModelShape(NamedTuple):
    """All families of experts of a model, ordered by layer, a layer's main one first.

    `dense_length` is the bytes of all tensors that belong to no expert, None if unknown.
    `mtp_layers` are those for multi-token prediction, which llama.cpp runs only for drafts.
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
        """By layer, the family that its router routes to."""
        return {family.layer: family for family in self.families if family.name == ROUTED_FAMILY}

    @property
    def expert_counts(self) -> dict[int, int]:
        """By layer, the number of experts that its router routes to."""
        return {layer: family.expert_count for layer, family in self.routed.items()}

    @property
    def experts_used(self) -> int | None:
        """The most experts that a token uses in any layer; None if unknown."""
        return max((family.experts_used or 0 for family in self.routed.values()), default=0) or None

    @property
    def expert_length(self) -> int:
        """The bytes of all experts of all families."""
        return sum(family.expert_count * family.expert_length for family in self.families)

    @property
    def routed_count(self) -> int:
        """The number of experts that routers route to, in all layers."""
        return sum(family.expert_count for family in self.routed.values())

    @property
    def routed_length(self) -> int:
        """The bytes of all experts that routers route to."""
        return sum(f.expert_count * f.expert_length for f in self.routed.values())

    def without_mtp(self) -> Self:
        """Return the shape of the layers that llama.cpp runs."""
        families = (family for family in self.families if family.layer not in self.mtp_layers)
        return self._replace(families=tuple(families), mtp_layers=())

    def using(self, count: int | None) -> Self:
        """Return the shape of a model whose tokens use `count` experts; the same for None."""
        if count is None:
            return self
        families = (
            family._replace(experts_used=min(count, family.expert_count))
            if family.name == ROUTED_FAMILY
            else family
            for family in self.families
        )
        return self._replace(families=tuple(families))

    def of_layers(self, layers: Collection[int]) -> Self:
        """Return the shape of some layers alone."""
        families = (family for family in self.families if family.layer in layers)
        return self._replace(families=tuple(families))

    def __str__(self) -> str:
        """Describe in a few words the experts that routers route to."""
        counts = self.expert_counts
        if not counts:
            return "no layers with experts"
        return f"layers {min(counts)} to {max(counts)}, up to {max(counts.values())} experts"


def is_row_table(name: str) -> bool:
    """Return whether a tensor is a table of rows for n-grams or layers; a token reads few of these.

    Such tables are longer than all that is dense, and are left on the drive: llama.cpp maps them
    (`--lazy-mode`). Their rows follow from the tokens alone.
    """
    return _ROW_TABLE.fullmatch(name) is not None
