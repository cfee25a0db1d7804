"""The caches of docs/policies.md, written again from that page alone, hit as moepack's do.

Everything is a plain list, gone through each time.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.common.shape import ROUTED_FAMILY, FamilyShape, ModelShape
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.simulation import lookups
from moepack.traces.simulation.simulate import POLICIES, simulate
from tests.support.amounts import amounts
from tests.support.trace_samples import pieces_of

LENGTHS = {0: (7, 5), 2: (6, 10), 3: (4, 12)}
"""By layer, how many experts, and the bytes of each."""
MTP = 5
SIZE = {(layer, n): length for layer, (count, length) in LENGTHS.items() for n in range(count)}
TOTAL = sum(SIZE.values())
PREFILL, DECODE, UNKNOWN = 0, 1, 2

Expert = tuple[int, int]
"""A layer and a number."""
Experts = Sequence[Expert]


class Token(NamedTuple):
    """A token as the file has it: its phase, and its choices by layer, in any order of layers."""

    phase: int
    choices: list[Expert]


class Step(NamedTuple):
    """A step: its call, whether it decodes, and its experts."""

    call: int
    is_decode: bool
    experts: list[Expert]


# A trace, and what it asks caches for.


@st.composite
def requests(draw: st.DrawFn) -> list[list[Token]]:
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    favourites = rng.sample(sorted(SIZE), 8)
    return [
        [
            _token(rng, phase, favourites)
            for phase in (PREFILL, DECODE, rng.choice([PREFILL, DECODE, UNKNOWN]), DECODE)
            for _ in range(rng.randrange(7))
        ]
        or [_token(rng, DECODE, favourites)]
        for _ in range(draw(st.integers(1, 5)))
    ]


def _token(rng: random.Random, phase: int, favourites: list[Expert]) -> Token:
    choices: list[Expert] = []
    layers = rng.sample([*LENGTHS, MTP], rng.randint(1, 4))
    for layer in [*layers, *([] if set(layers) & set(LENGTHS) else [0])]:
        count = LENGTHS.get(layer, (3, 0))[0]
        liked = [n for at, n in favourites if at == layer and rng.random() < 0.6]
        others = [n for n in rng.sample(range(count), rng.randint(1, 3)) if n not in liked]
        choices += [(layer, n) for n in [*liked, *others][:3]]
    return Token(phase, choices)


def write(path: Path, trace: Sequence[Sequence[Token]]) -> None:
    rows = ["turn,phase,step,layer,slot,expert,weight"]
    for turn, tokens in enumerate(trace):
        for number, (phase, choices) in enumerate(tokens):
            rows += [f"{turn},{phase},{number},{layer},0,{n},0" for layer, n in choices]
    path.write_text("\n".join([*rows, ""]))


def calls_of(tokens: Sequence[Token], batch: int | None) -> list[list[Token]]:
    calls: list[list[Token]] = []
    before = None
    for token in tokens:
        goes_on = token.phase == PREFILL and before == PREFILL
        if goes_on and (batch is None or len(calls[-1]) < batch):
            calls[-1].append(token)
        else:
            calls.append([token])
        before = token.phase
    return calls


def all_steps(trace: Sequence[Sequence[Token]], batch: int | None) -> list[Step]:
    calls = [call for tokens in trace for call in calls_of(tokens, batch)]
    return [step for number, call in enumerate(calls) for step in steps_of(number, call)]


def steps_of(number: int, call: Sequence[Token]) -> Iterator[Step]:
    for layer in LENGTHS:
        experts: list[Expert] = []
        for token in call:
            for expert in token.choices:
                if expert[0] == layer:
                    if expert in experts:
                        experts.remove(expert)
                    experts.append(expert)
        if experts:
            yield Step(number, call[0].phase != PREFILL, experts)


# Policies, each of which records steps and names the expert to evict; and a cache.


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

    def __init__(self, budget: int, policy: Lru | Belady, size: Callable[[Expert], int]) -> None:
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


# What is counted.

NAMES = ("decode_hit_rate", "warm_hit_rate", "hit_rate", "bytes_per_token", "read_length")
Expected = tuple[float | None, float | None, float | None, float | None, int | None]
"""Those facts of a cache."""


def ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def counted(steps: Sequence[Step], token_count: int, caches: dict[int, Cache] | Cache) -> Expected:
    used: set[Expert] = set()
    hits, counts, lengths, cold_count = [0, 0], [0, 0], [0, 0], 0
    for step in steps:
        cache = caches if isinstance(caches, Cache) else caches[step.experts[0][0]]
        misses = cache.step(step.experts)
        counts[step.is_decode] += len(step.experts)
        hits[step.is_decode] += len(step.experts) - len(misses)
        lengths[step.is_decode] += sum(map(SIZE.__getitem__, misses))
        if step.is_decode:
            cold_count += len(set(step.experts) - used)
        used.update(step.experts)
    return (
        ratio(hits[1], counts[1]),
        ratio(hits[1], counts[1] - cold_count),
        ratio(sum(hits), sum(counts)),
        ratio(lengths[1], token_count),
        sum(lengths),
    )


def hottest(counts: Counter[Expert], budget: int) -> set[Expert]:
    hottest: set[Expert] = set()
    for expert in sorted(SIZE, key=lambda expert: (-counts[expert], expert)):
        budget -= SIZE[expert]
        if budget < 0:
            break
        hottest.add(expert)
    return hottest


def static(steps: Sequence[Step], token_count: int, budget: int) -> Expected:
    decoded = [step for step in steps if step.is_decode]
    calls = sorted({step.call for step in decoded})
    learned = set(calls[: token_count // 2])
    counts: Counter[Expert] = Counter()
    for step in decoded:
        counts.update(step.experts if step.call in learned else ())
    pinned = hottest(counts, budget)
    measured = [key for step in decoded if step.call not in learned for key in step.experts]
    missed = [key for key in measured if key not in pinned]
    rest = token_count - token_count // 2
    rate = ratio(len(measured) - len(missed), len(measured))
    return (rate, None, None, ratio(sum(map(SIZE.__getitem__, missed)), rest), None)


KINDS: dict[str, Callable[[Sequence[Step]], Lru | Belady]] = {
    "lru": lambda _: Lru(),
    "lrfu": lambda _: Lrfu(),
    "belady": lambda steps: Belady([step.experts for step in steps]),
}


def expected(policy: str, budget: int, steps: Sequence[Step], token_count: int) -> Expected:
    if policy == "static":
        return static(steps, token_count, budget)
    cache = Cache(budget, KINDS[policy](steps), SIZE.__getitem__)
    return counted(steps, token_count, cache)


@pytest.mark.parametrize("examples", amounts(20, 2000))
def test_caches_that_are_written_after_the_page_hit_the_same(examples: int, tmp_path: Path) -> None:
    @settings(max_examples=examples)
    @given(
        trace=requests(),
        batch=st.sampled_from([None, None, 1, 3]),
        budgets=st.lists(st.integers(36, TOTAL + 1), min_size=1, max_size=3),
    )
    def hit_the_same(trace: list[list[Token]], batch: int | None, budgets: list[int]) -> None:
        compare(tmp_path / "trace.csv", trace, batch, budgets)

    hit_the_same()


def compare(
    path: Path,
    trace: Sequence[Sequence[Token]],
    batch: int | None,
    budgets: Sequence[int],
) -> None:
    write(path, trace)
    families = [
        *(FamilyShape(layer, ROUTED_FAMILY, *LENGTHS[layer]) for layer in LENGTHS),
        FamilyShape(MTP, ROUTED_FAMILY, 3, 9),
    ]
    # In pieces in which layers come in another order than that of their numbers.
    with pieces_of(100), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "_GROUP_COUNT", 25)
        facts = simulate(
            [str(path)],
            budgets=budgets,
            batch_count=batch,
            options=ReadOptions(shape=ModelShape(tuple(families), mtp_layers=(MTP,))),
        )
    steps = all_steps(trace, batch)
    token_count = sum(token.phase != PREFILL for tokens in trace for token in tokens)
    assert facts.decode_token_count == token_count
    for one in facts.results:
        right = expected(one.policy, one.budget_length, steps, token_count)
        assert tuple(getattr(one, name) for name in NAMES) == right, one
    assert {one.policy for one in facts.results} == {*POLICIES}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_page_names_every_policy(policy: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "policies.md").read_text()
    assert f"`{policy}`" in page
