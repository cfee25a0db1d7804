"""The hotness that a pack's index holds: no file of counts is needed to use it again."""

from moepack.keys import ExpertKey
from moepack.reading.locations import BlobLocation
from moepack.reading.pack import Pack
from moepack.shape import ROUTED_FAMILY


def routed_blobs(pack: Pack) -> dict[ExpertKey, BlobLocation]:
    """Return where the blob of each expert lies that a router chooses, by its key."""
    return {
        ExpertKey(layer, expert): pack.locate(layer, expert, family=ROUTED_FAMILY)
        for layer, expert_count in pack.shape.expert_counts.items()
        for expert in range(expert_count)
    }


def stored_counts(pack: Pack) -> dict[ExpertKey, int]:
    """Return how often each expert was chosen; without those that were not, or not measured."""
    return {key: blob.hotness for key, blob in routed_blobs(pack).items() if blob.hotness}
