"""Caches as docs/policies.md describes them, written from that page alone.

A policy records each step, and names the expert to evict. Everything is a plain list, gone through
each time; nothing here is of moepack's.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

Expert = tuple[int, int]
"""A layer and a number."""
Experts = Sequence[Expert]


class Policy(Protocol):
    """An order of eviction."""

    def record(self, step: Experts, misses: Experts) -> None:
        """Record the experts of a step, and those of them that were missing."""

    def evict(self, step: Experts) -> Expert | None:
        """Evict an expert that is not of the step; None if there is none."""


class Lru:
    """The order of last uses."""

    def __init__(self) -> None:
        self.by_use: list[Expert] = []

    def record(self, step: Experts, misses: Experts) -> None:
        self.by_use = [expert for expert in self.by_use if expert not in step] + list(step)

    def evict(self, step: Experts) -> Expert | None:
        others = [expert for expert in self.by_use if expert not in step]
        expert = min(others, key=self.rank, default=None)
        if expert is not None:
            self.by_use.remove(expert)
        return expert

    def rank(self, expert: Expert) -> int:
        return 0


class Lfu(Lru):
    """Counts of steps, and the order of last uses."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Expert] = Counter()

    def record(self, step: Experts, misses: Experts) -> None:
        super().record(step, misses)
        self.counts.update(step)

    def rank(self, expert: Expert) -> int:
        return self.counts[expert]


class S3Fifo:
    """Queues of experts, and the uses of each."""

    def __init__(self) -> None:
        self.small: list[Expert] = []
        self.main: list[Expert] = []
        self.ghosts: list[Expert] = []
        self.uses: dict[Expert, int] = {}

    def record(self, step: Experts, misses: Experts) -> None:
        for expert in step:
            if expert not in misses:
                self.uses[expert] = min(3, self.uses[expert] + 1)
        for expert in misses:
            self.uses[expert] = 0
            if expert in self.ghosts:
                self.ghosts.remove(expert)
                self.main.append(expert)
            else:
                self.small.append(expert)

    def evict(self, step: Experts) -> Expert | None:
        while True:
            is_small_first = 10 * len(self.small) >= len(self.small) + len(self.main)
            queues = [self.small, self.main] if is_small_first else [self.main, self.small]
            candidates = [expert for queue in queues for expert in queue if expert not in step]
            if not candidates:
                return None
            expert = candidates[0]
            if expert in self.main:
                self.main.remove(expert)
                if not self.uses[expert]:
                    return expert
                self.uses[expert] -= 1
                self.main.append(expert)
            else:
                self.small.remove(expert)
                if self.uses[expert] < 2:
                    self.ghosts.append(expert)
                    while len(self.ghosts) > len(self.small) + len(self.main):
                        self.ghosts.pop(0)
                    return expert
                self.uses[expert] = 0
                self.main.append(expert)


class LeastStale:
    """Stale experts, and the fresh ones of each layer."""

    def __init__(self) -> None:
        self.stale: list[Expert] = []
        self.fresh: dict[int, list[Expert]] = {}
        """The experts of each layer's last step, in the order of these steps."""

    def record(self, step: Experts, misses: Experts) -> None:
        layer = step[0][0]
        self.stale += self.fresh.pop(layer, [])
        self.stale = [expert for expert in self.stale if expert not in step]
        self.fresh[layer] = list(step)

    def evict(self, step: Experts) -> Expert | None:
        ordered = itertools.chain(self.stale, *reversed(self.fresh.values()))
        expert = next((expert for expert in ordered if expert not in step), None)
        if expert is not None:
            (self.stale if expert in self.stale else self.fresh[expert[0]]).remove(expert)
        return expert


def split_mix_64() -> Iterator[int]:
    """Yield the numbers of SplitMix64 from the seed 0."""
    state = 0
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        number = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % 2**64
        yield number ^ (number >> 31)


class AnyOne:
    """A list, and random numbers."""

    def __init__(self) -> None:
        self.experts: list[Expert] = []
        self.numbers = split_mix_64()

    def record(self, step: Experts, misses: Experts) -> None:
        self.experts += misses

    def evict(self, step: Experts) -> Expert | None:
        if not self.experts:
            return None
        start = next(self.numbers) % len(self.experts)
        for expert in self.experts[start:] + self.experts[:start]:
            if expert not in step:
                index, last = self.experts.index(expert), self.experts.pop()
                if index < len(self.experts):
                    self.experts[index] = last
                return expert
        return None


class Belady:
    """Experts, and all steps that are to come."""

    def __init__(self, steps: Sequence[Experts]) -> None:
        self.coming = list(steps)
        self.resident: set[Expert] = set()

    def record(self, step: Experts, misses: Experts) -> None:
        self.coming.pop(0)
        self.resident.update(misses)

    def evict(self, step: Experts) -> Expert | None:
        expert = max(sorted(self.resident - set(step)), key=self.next_use, default=None)
        if expert is not None:
            self.resident.remove(expert)
        return expert

    def next_use(self, expert: Expert) -> int:
        uses = (number for number, step in enumerate(self.coming) if expert in step)
        return next(uses, len(self.coming))


class Cache:
    """Experts within a budget; `size` is the part of it that each takes."""

    def __init__(self, budget: int, policy: Policy, size: Callable[[Expert], int]) -> None:
        self.budget, self.policy, self.size = budget, policy, size
        self.resident: set[Expert] = set()

    def step(self, experts: Experts) -> list[Expert]:
        """Return the misses."""
        misses = [expert for expert in experts if expert not in self.resident]
        self.resident.update(misses)
        self.policy.record(experts, misses)
        while sum(map(self.size, self.resident)) > self.budget:
            expert = self.policy.evict(experts)
            if expert is None:
                break
            self.resident.remove(expert)
        return misses
