"""The experts that programs have needed: lookups, reads and memory, counted by a pager."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagerUsage:
    """The experts that programs have needed so far.

    Lookups are counted when they are announced: not while all experts stay in memory, which
    `holds_all` says of now. `fault_count` are page faults on experts that were not announced.
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
