"""The hotness that a pack's index holds: no file of counts is needed to use it again."""

from moepack.keys import ExpertKey
from moepack.reading.pack import BlobLocation, Pack
from moepack.shape import ROUTED_FAMILY, FamilyShape, ModelShape


def pack_shape(pack: Pack) -> ModelShape:
    """Return the shape of what a pack holds."""
    families = (
        FamilyShape(
            layer=layer,
            name=name,
            expert_count=pack.expert_count(layer, family=name),
            expert_length=sum(kind.length for kind in pack.parts(layer, family=name)),
        )
        for layer in pack.layers
        for name in pack.families(layer)
    )
    return ModelShape(tuple(families))


def routed_blobs(pack: Pack) -> dict[ExpertKey, BlobLocation]:
    """Return where the blob of each expert lies that a router chooses, by its key."""
    return {
        ExpertKey(layer, expert): pack.locate(layer, expert, family=ROUTED_FAMILY)
        for layer in pack.layers
        if ROUTED_FAMILY in pack.families(layer)
        for expert in range(pack.expert_count(layer, family=ROUTED_FAMILY))
    }


def stored_counts(pack: Pack) -> dict[ExpertKey, int]:
    """Return how often each expert was chosen; without those that were not, or not measured."""
    return {key: blob.hotness for key, blob in routed_blobs(pack).items() if blob.hotness}
