"""The experts that programs have needed: lookups, reads and memory, as their caches count them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertUsage:
    """The experts that programs have needed so far.

    Lookups are counted when they are announced: not while all experts stay in memory, which
    `holds_all` says of now. `fault_count` is accesses to experts that no router had announced.
    `resident_length` is memory that is taken, in whole pages, `expert_length` the experts in it.
    `routed_count` is tokens that were routed: of one that half of the layers have computed it is
    one half. Lengths are bytes.
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
