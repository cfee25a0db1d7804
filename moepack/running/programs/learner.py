"""Learns from a run which experts a model uses most, for the next one: counts, and no text."""

import os
import time
from collections.abc import Callable, Mapping

from moepack.common.errors import MachineError, MoepackError, TraceError
from moepack.pack.reading.pack import Pack
from moepack.running.pager.pager import Pager
from moepack.traces.analysis.learned import UseCounter, judge_learned
from moepack.traces.hotness.learned import Learned
from moepack.traces.hotness.learned_store import LearnedStore

VARIABLE = "MOEPACK_LEARN"
"""With this variable `0`, `no`, `off` or `false`, nothing is learned, and earlier counts are
unused."""
_NO = {"0", "no", "off", "false"}
_SECONDS_BETWEEN = 120.0
"""The interval at which counts are written, so that a kill loses little."""


class Learner:
    """Counts the routed experts of a model while it runs, and keeps the counts in `store`.

    `most_used` are experts for a pager, from earlier runs; `is_pinning` is whether the first of
    them are worth being evicted last. `notice` is called with a sentence about a failure: then the
    run goes on without.
    """

    def __init__(self, store: LearnedStore, notice: Callable[[str], None]) -> None:
        self._store, self._notice = store, notice
        learned = self._read()
        verdict = judge_learned(learned)
        self.most_used = learned.hottest_first() if verdict.is_warming else []
        self.is_pinning = verdict.is_pinning
        self._counter = UseCounter(learned)
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

    def write(self, pager: Pager, *, is_last: bool = False) -> None:
        """Count the selections since the last time; write the counts now and then, and at last."""
        for selection in pager.pop_selections():
            self._counter.add(selection.layer, selection.token_count, selection.experts)
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
    if not learn or not is_learning(os.environ):
        return None
    try:
        store = LearnedStore(pack)
    except MachineError:
        return None  # as in a container without a home: nobody expects anything to be kept
    return Learner(store, notice)


def is_learning(environment: Mapping[str, str]) -> bool:
    """Return whether the variable leaves learning on."""
    return environment.get(VARIABLE, "").strip().lower() not in _NO
