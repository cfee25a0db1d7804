"""Counts of the experts that runs of a model use, and no text, kept for its later runs."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from moepack.common.errors import MachineError, MoepackError, TraceError
from moepack.common.paths import PathOrPaths
from moepack.pack.opening.open_model import open_model
from moepack.pack.reading.pack import Pack
from moepack.traces.analysis.learned import UseCounter, judge_learned
from moepack.traces.hotness import coverage
from moepack.traces.hotness.coverage import Coverage, routed_experts
from moepack.traces.hotness.learned import Learned, LearnedStore
from moepack.traces.hotness.model import Hotness

VARIABLE = "MOEPACK_LEARN"
"""With this variable `0`, `no`, `off` or `false`, nothing is learned, and earlier counts are
unused."""
_NO = {"0", "no", "off", "false"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECONDS_BETWEEN = 120.0
"""The interval at which counts are written, so that a kill loses little."""


class Learner:
    """Counts the routed experts of a model while it runs, and keeps the counts in `store`.

    `most_used` are experts to begin with, and the shares of tokens that used them in earlier runs.
    `notice` is called with a sentence about a failure: then the run goes on without.
    """

    def __init__(self, store: LearnedStore, notice: Callable[[str], None]) -> None:
        self._store, self._notice = store, notice
        learned = self._read()
        verdict = judge_learned(learned)
        self.most_used = learned.shares() if verdict.is_warming else {}
        self._counter = UseCounter(learned.expert_counts)
        self._pending = store.new()
        self._next_writing = time.monotonic() + _SECONDS_BETWEEN
        self._has_failed = False

    def _read(self) -> Learned:
        try:
            return self._store.read()
        except TraceError as error:
            self._notice(f"{error}: learning begins anew")
        except MachineError as error:
            self._notice(str(error))
        return self._store.new()

    def add(self, layer: int, token_count: int, experts: Sequence[int]) -> None:
        """Count the routing of a layer: for each of the tokens as many experts, in turn."""
        self._counter.add(layer, token_count, experts)

    def write(self, *, is_last: bool) -> None:
        """Write the counts now and then, and at last."""
        self._pending.add(self._counter.pop_windows(is_last=is_last))
        now = time.monotonic()
        is_due = is_last or now >= self._next_writing
        if not (self._pending.windows and is_due) or self._has_failed:
            return
        self._next_writing = now + _SECONDS_BETWEEN
        try:
            if self._store.add(self._pending.windows, 2.0 if is_last else 0.0):
                self._pending = self._store.new()
        except MoepackError as error:
            self._has_failed = True
            self._notice(f"the counts of this run are not kept: {error}")


def make_learner(
    pack: Pack, *, learn: bool = True, notice: Callable[[str], None] = lambda text: None
) -> Learner | None:
    """Return the learner for a run of the model in `pack`.

    None if learning is switched off, by `learn` or VARIABLE, or the user has no folder.
    """
    if not learn or os.environ.get(VARIABLE, "").strip().lower() in _NO:
        return None
    try:
        store = LearnedStore(pack)
    except MachineError:
        return None  # as in a container without a home: nobody expects anything to be kept
    return Learner(store, notice)


@dataclass(frozen=True, slots=True)
class LearnedFacts:
    """Counts of a model's recent runs, as the file at `path` keeps them.

    `since` is the first day of the counts, null without any. `chosen_count` of
    `expert_count` experts were used at all. `coverage` is by these counts themselves; `verdict`
    and `reason` are those of `concentration`. `is_warming` is whether runs read the most used
    experts at their start.
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
