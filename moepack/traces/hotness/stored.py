"""The hotness that a pack's index holds: no file of counts is needed to use it again."""

from moepack.common.keys import ExpertKey
from moepack.common.shape import ROUTED_FAMILY
from moepack.pack.reading.locations import ExpertHotness
from moepack.pack.reading.pack import Pack


def routed_experts(pack: Pack) -> dict[ExpertKey, ExpertHotness]:
    """Return the hotness of each routed expert, by its key."""
    return {
        ExpertKey(layer, expert): pack.hotness(layer, expert, family=ROUTED_FAMILY)
        for layer, expert_count in pack.shape.expert_counts.items()
        for expert in range(expert_count)
    }


def stored_counts(pack: Pack) -> dict[ExpertKey, int]:
    """Return the selections of each expert, without zeros and unmeasured experts."""
    return {key: one.hotness for key, one in routed_experts(pack).items() if one.hotness}
