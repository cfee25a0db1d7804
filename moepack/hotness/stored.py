"""The hotness that a pack's index holds: no file of counts is needed to use it again."""

from moepack.keys import ExpertKey
from moepack.reading.locations import ExpertHotness
from moepack.reading.pack import Pack
from moepack.shape import ROUTED_FAMILY


def routed_experts(pack: Pack) -> dict[ExpertKey, ExpertHotness]:
    """Return how hot each expert is that a router chooses, by its key."""
    return {
        ExpertKey(layer, expert): pack.hotness(layer, expert, family=ROUTED_FAMILY)
        for layer, expert_count in pack.shape.expert_counts.items()
        for expert in range(expert_count)
    }


def stored_counts(pack: Pack) -> dict[ExpertKey, int]:
    """Return how often each expert was chosen; without those that were not, or not measured."""
    return {key: found.hotness for key, found in routed_experts(pack).items() if found.hotness}
