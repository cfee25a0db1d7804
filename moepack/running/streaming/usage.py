"""The experts that programs have needed: lookups, reads and memory, as their caches count them."""

from dataclasses import dataclass
from typing import NamedTuple

_LEAST_CONTROLS = 16
_UNDERSTOOD = 0.95


class Prefetches(NamedTuple):
    """Experts that the next layer's router named while a layer was computed, in decoding.

    Of `guessed_count` experts `right_count` were routed to; `read_count` of them were missing and
    read, of which `used_count` were routed to. `control_count` times a layer's own router was asked
    with its own input: if it does not name what was routed, nothing is prefetched any more.
    """

    guessed_count: int = 0
    right_count: int = 0
    read_count: int = 0
    used_count: int = 0
    control_count: int = 0
    control_right_count: int = 0

    @property
    def is_off(self) -> bool:
        """Whether nothing is prefetched, as the routers of this model are not understood."""
        enough = self.control_count >= _LEAST_CONTROLS
        return enough and self.control_right_count < _UNDERSTOOD * self.control_count

    def since(self, before: "Prefetches") -> "Prefetches":
        """Return what was counted after `before`."""
        return Prefetches(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True, slots=True)
class ExpertUsage:
    """The experts that programs have needed so far.

    Lookups are counted when they are announced: not while all experts stay in memory, which
    `holds_all` says of now. Those in layers for multi-token prediction, which only draft, are
    counted apart. `fault_count` is accesses to experts that no router had announced.
    `resident_length` is memory that is taken, in whole pages, `expert_length` the experts in it.
    `routed_count` is tokens that were routed: of one that half of the layers have computed it is
    one half. `wasted_length` is what was prefetched for decoding or prompts, and not used. Lengths
    are bytes.
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
