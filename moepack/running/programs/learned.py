"""Counts of a model's runs, by its path: shown, used as hotness, removed."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from moepack.common.paths import PathOrPaths
from moepack.pack.opening.open_model import open_model
from moepack.traces.analysis.learned import judge_learned
from moepack.traces.hotness import coverage
from moepack.traces.hotness.coverage import Coverage, routed_experts
from moepack.traces.hotness.learned_store import LearnedStore
from moepack.traces.hotness.model import Hotness

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class LearnedFacts:
    """Counts of a model's recent runs, as the file at `path` keeps them.

    `since` is the first day of the counts, null without any. `chosen_count` of
    `expert_count` experts were used at all. `coverage` is by these counts themselves; `verdict`
    and `reason` are those of `concentration`. `is_warming` and `is_pinning` are whether runs read
    the most used experts at their start, and pin the first of them.
    """

    path: str
    since: str | None
    token_count: int
    selection_count: int
    chosen_count: int
    expert_count: int
    coverage: Coverage | None
    verdict: str
    reason: str
    is_warming: bool
    is_pinning: bool


def learned_facts(path: PathOrPaths) -> LearnedFacts:
    """Return the counts of a model's recent runs; `path` is a pack, or any shard of a GGUF.

    Raises what opening it raises, TraceError for a damaged file, and MachineError.
    """
    with open_model(path) as pack:
        store = LearnedStore(pack)
        learned = store.read()
        counts = learned.counts
        verdict = judge_learned(learned)
        lengths = {key: expert.length for key, expert in routed_experts(pack).items()}
        days = [window.day for window in learned.windows]
        return LearnedFacts(
            path=os.fspath(store.path),
            since=(_EPOCH + timedelta(min(days))).date().isoformat() if days else None,
            token_count=learned.token_count,
            selection_count=counts.total(),
            chosen_count=len(counts),
            expert_count=sum(learned.expert_counts.values()),
            coverage=coverage.measure(counts, lengths) if counts else None,
            verdict=verdict.verdict,
            reason=verdict.reason,
            is_warming=verdict.is_warming,
            is_pinning=verdict.is_pinning,
        )


def learned_hotness(path: PathOrPaths) -> Hotness:
    """Return the counts of a model's recent runs as hotness, the later half held out.

    Raises what `learned_facts` raises, and TraceError without any counts.
    """
    with open_model(path) as pack:
        store = LearnedStore(pack)
        return store.read().to_hotness(os.fspath(store.path))


def forget_learned(path: PathOrPaths) -> bool:
    """Remove the counts of a model's runs; return whether there were any.

    Raises what opening the model raises, and MachineError.
    """
    with open_model(path) as pack:
        return LearnedStore(pack).forget()
