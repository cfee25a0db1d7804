"""Caches as docs/policies.md describes them, written from that page alone.

A policy records each step, and names the expert to evict. Everything is a plain list, gone through
each time; nothing here is of moepack's.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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

    def rank(self, expert: Expert) -> Any:
        return 0


class Lrfu(Lru):
    """Counts that are halved, and the order of last uses."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Expert] = Counter()
        self.calls = 0
        self.last_steps: dict[int, Experts] = {}
        self.layer = 0

    def record(self, step: Experts, misses: Experts) -> None:
        super().record(step, misses)
        self.layer = step[0][0]
        self.last_steps[self.layer] = list(step)
        if self.layer == min(self.last_steps):
            self.calls += 1
            if self.calls % 16 == 0:
                for expert in self.counts:
                    self.counts[expert] //= 2
        for expert in step:
            self.counts[expert] += 2**32

    def rank(self, expert: Expert) -> Any:
        layer = expert[0]
        is_recent = expert in self.last_steps[layer]
        turns = sorted(self.last_steps, key=lambda one: (one > self.layer, -one))
        return self.counts[expert] + is_recent * 16 * 2**32, turns.index(layer)


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
