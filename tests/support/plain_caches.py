"""Caches as docs/policies.md says that they work, written from that page alone.

A policy is told of each step, and names what goes. Everything is a plain list, and all of it is
gone through each time; nothing here is of moepack's.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

Expert = tuple[int, int]
"""A layer and a number."""


class Lru:
    """The order of last uses."""

    def __init__(self) -> None:
        self.by_use: list[Expert] = []

    def note(self, step: Sequence[Expert], misses: Sequence[Expert]) -> None:
        """Take what a step uses, and what of that comes in."""
        for expert in step:
            if expert in self.by_use:
                self.by_use.remove(expert)
            self.by_use.append(expert)

    def leave(self, step: Sequence[Expert]) -> Expert | None:
        """Name an expert that goes, none of the step's; None where there is none."""
        others = [expert for expert in self.by_use if expert not in step]
        if not others:
            return None
        self.by_use.remove(others[0])
        return others[0]


class Lfu(Lru):
    """Counts of steps, and the order of last uses."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Expert] = Counter()

    def note(self, step: Sequence[Expert], misses: Sequence[Expert]) -> None:
        """Take what a step uses, and what of that comes in."""
        super().note(step, misses)
        self.counts.update(step)

    def leave(self, step: Sequence[Expert]) -> Expert | None:
        """Name an expert that goes, none of the step's; None where there is none."""
        others = [expert for expert in self.by_use if expert not in step]
        if not others:
            return None
        least = min(self.counts[expert] for expert in others)
        gone = next(expert for expert in others if self.counts[expert] == least)
        self.by_use.remove(gone)
        return gone


class S3Fifo:
    """Queues of experts, and the uses of each."""

    def __init__(self) -> None:
        self.small: list[Expert] = []
        self.main: list[Expert] = []
        self.ghosts: list[Expert] = []
        self.uses: dict[Expert, int] = {}

    def note(self, step: Sequence[Expert], misses: Sequence[Expert]) -> None:
        """Take what a step uses, and what of that comes in."""
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

    def leave(self, step: Sequence[Expert]) -> Expert | None:
        """Name an expert that goes, none of the step's; None where there is none."""
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
        self.fresh: list[tuple[int, list[Expert]]] = []
        """Layers and what their last step used, in the order of these steps."""

    def note(self, step: Sequence[Expert], misses: Sequence[Expert]) -> None:
        """Take what a step uses, and what of that comes in."""
        layer = step[0][0]
        for one in [one for one in self.fresh if one[0] == layer]:
            self.fresh.remove(one)
            self.stale += [expert for expert in one[1] if expert not in step]
        self.stale = [expert for expert in self.stale if expert not in step]
        self.fresh.append((layer, list(step)))

    def leave(self, step: Sequence[Expert]) -> Expert | None:
        """Name an expert that goes, none of the step's; None where there is none."""
        if self.stale:
            return self.stale.pop(0)
        for _, experts in reversed(self.fresh):
            for expert in experts:
                if expert not in step:
                    experts.remove(expert)
                    return expert
        return None


class AnyOne:
    """A list, and numbers that are drawn."""

    def __init__(self) -> None:
        self.experts: list[Expert] = []
        self.random = random.Random(0)

    def note(self, step: Sequence[Expert], misses: Sequence[Expert]) -> None:
        """Take what a step uses, and what of that comes in."""
        self.experts += misses

    def leave(self, step: Sequence[Expert]) -> Expert | None:
        """Name an expert that goes, none of the step's; None where there is none."""
        if not self.experts:
            return None
        start = self.random.randrange(len(self.experts))
        for place in itertools.chain(range(start, len(self.experts)), range(start)):
            expert = self.experts[place]
            if expert not in step:
                last = self.experts.pop()
                if place < len(self.experts):
                    self.experts[place] = last
                return expert
        return None


class Belady:
    """Experts, and all steps that are to come."""

    def __init__(self, steps: Sequence[Sequence[Expert]]) -> None:
        self.coming = list(steps)
        self.held: set[Expert] = set()

    def note(self, step: Sequence[Expert], misses: Sequence[Expert]) -> None:
        """Take what a step uses, and what of that comes in."""
        self.coming.pop(0)
        self.held.update(misses)

    def leave(self, step: Sequence[Expert]) -> Expert | None:
        """Name an expert that goes, none of the step's; None where there is none."""
        others = sorted(self.held - set(step))
        if not others:
            return None
        uses = [self.next_use(expert) for expert in others]
        gone = others[uses.index(max(uses))]
        self.held.remove(gone)
        return gone

    def next_use(self, expert: Expert) -> int:
        """Count the steps until an expert is used next."""
        uses = (number for number, step in enumerate(self.coming) if expert in step)
        return next(uses, len(self.coming))


Policy = Lru | Lfu | S3Fifo | LeastStale | AnyOne | Belady


class Cache:
    """Experts within a budget; `size` is what each takes of it."""

    def __init__(self, budget: int, policy: Policy, size: Callable[[Expert], int]) -> None:
        self.budget, self.policy, self.size = budget, policy, size
        self.held: set[Expert] = set()

    def step(self, experts: Sequence[Expert]) -> list[Expert]:
        """Return the misses."""
        misses = [expert for expert in experts if expert not in self.held]
        self.held.update(misses)
        self.policy.note(experts, misses)
        while sum(map(self.size, self.held)) > self.budget:
            gone = self.policy.leave(experts)
            if gone is None:
                break
            assert gone in self.held
            assert gone not in experts
            self.held.remove(gone)
        return misses
