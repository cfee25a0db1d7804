"""The experts that programs have needed: lookups, reads and memory, as their caches count them."""

from dataclasses import dataclass
from typing import NamedTuple


class Prefetches(NamedTuple):
    """Experts that the next layer's router named while a layer was computed, in decoding.

    Of `guessed_count` experts `right_count` were routed to; `read_count` of them were missing and
    read, of which `used_count` were routed to. `control_count` times a layer's own router was asked
    with its own input: if it too often does not name what was routed, as in models whose routers
    are not understood, prefetching `is_off` from then on.
    """

    guessed_count: int = 0
    right_count: int = 0
    read_count: int = 0
    used_count: int = 0
    control_count: int = 0
    control_right_count: int = 0
    is_off: bool = False

    def since(self, before: "Prefetches") -> "Prefetches":
        """Return what was counted after `before`, and whether it is off now."""
        return Prefetches(
            self.guessed_count - before.guessed_count,
            self.right_count - before.right_count,
            self.read_count - before.read_count,
            self.used_count - before.used_count,
            self.control_count - before.control_count,
            self.control_right_count - before.control_right_count,
            self.is_off,
        )


@dataclass(frozen=True, slots=True)
class ExpertUsage:
    """The experts that programs have needed so far.

    Lookups are counted when they are announced: not while all experts stay in memory, which
    `holds_all` says of now. Those in layers for multi-token prediction, which only draft, are
    counted apart. `fault_count` is accesses to experts that no router had announced.
    `resident_length` is memory that is taken, in whole pages, `expert_length` the experts in it.
    `routed_count` is tokens that were routed: of one that half of the layers have computed it is
    one half. `wasted_length` is what was prefetched for decoding or prompts, and not used. Of
    reads of experts that were right before, `rechecked_count` were compared with their digests
    again. Lengths are bytes.
    """

    hit_count: int
    miss_count: int
    read_length: int
    read_seconds: float
    fault_count: int
    resident_length: int
    budget: int
    holds_all: bool
    expert_length: int
    routed_count: int
    prefetches: Prefetches
    wasted_length: int
    draft_hit_count: int = 0
    draft_miss_count: int = 0
    rechecked_count: int = 0
