"""What was learned of a model by its path: shown, taken as hotness, forgotten."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from moepack.analysis.learned import judge_learned
from moepack.hotness import coverage
from moepack.hotness.coverage import Coverage
from moepack.hotness.learned_store import LearnedStore
from moepack.hotness.model import Hotness
from moepack.hotness.stored import routed_experts
from moepack.packing.opening import open_model
from moepack.paths import PathOrPaths
from moepack.reading.pack import Pack

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class LearnedFacts:
    """What runs of a model have chosen lately, as the file at `path` keeps it.

    `since` is the day from which on it was counted, null where nothing was. `chosen_count` of
    `expert_count` experts were chosen at all. `coverage` is by these counts themselves; `verdict`
    and `reason` are those of `concentration`. `is_warming` and `is_pinning` say whether runs read
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
    """Return what runs of a model chose lately; `path` is a pack, or any shard of a GGUF.

    Raises what opening it raises, TraceError for a damaged file, and MachineError.
    """
    with open_model(path) as pack:
        store = LearnedStore(pack)
        learned = store.read()
        counts = learned.counts
        verdict = judge_learned(learned)
        days = [window.day for window in learned.windows]
        return LearnedFacts(
            path=os.fspath(store.path),
            since=(_EPOCH + timedelta(min(days))).date().isoformat() if days else None,
            token_count=learned.token_count,
            selection_count=int(counts.sum()),
            chosen_count=int((counts > 0).sum()),
            expert_count=learned.place_count,
            coverage=_coverage(pack, learned.to_hotness("")) if counts.any() else None,
            verdict=verdict.verdict,
            reason=verdict.reason,
            is_warming=verdict.is_warming,
            is_pinning=verdict.is_pinning,
        )


def learned_hotness(path: PathOrPaths) -> Hotness:
    """Return what runs of a model have chosen lately as hotness, the later half held out.

    Raises what `learned_facts` does, and TraceError where nothing was counted.
    """
    with open_model(path) as pack:
        store = LearnedStore(pack)
        return store.read().to_hotness(os.fspath(store.path))


def forget_learned(path: PathOrPaths) -> bool:
    """Remove what was learned of a model; return whether there was anything.

    Raises what opening the model raises, and MachineError.
    """
    with open_model(path) as pack:
        return LearnedStore(pack).forget()


def _coverage(pack: Pack, hotness: Hotness) -> Coverage:
    lengths = {key: expert.length for key, expert in routed_experts(pack).items()}
    return coverage.of(hotness.counts, lengths)
