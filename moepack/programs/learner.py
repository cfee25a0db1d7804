"""Learns from a run which experts a model uses most, for the next one: counts, and no text."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from moepack.analysis.learned import UseCounter, judge_learned
from moepack.errors import MachineError, MoepackError, TraceError
from moepack.hotness.learned import Learned
from moepack.hotness.learned_store import LearnedStore
from moepack.pager.pager import Pager
from moepack.pager.warm_up import MostUsed
from moepack.reading.pack import Pack

VARIABLE = "MOEPACK_LEARN"
"""With this variable `0`, `no`, `off` or `false`, nothing is learned, and nothing of it used."""
_NO = {"0", "no", "off", "false"}
_SECONDS_BETWEEN = 120.0
"""How often what was counted is written, so that a kill loses little."""

Notice = Callable[[str], None]


class Learner:
    """Counts what is chosen of a model while it runs, and keeps that in `store`.

    `most_used` is what was learned before, as a pager takes it. `notice` is called with a sentence
    about what went wrong: then it goes without.
    """

    def __init__(self, store: LearnedStore, notice: Notice) -> None:
        self._store, self._notice = store, notice
        learned = self._read()
        verdict = judge_learned(learned)
        keys = learned.hottest_first() if verdict.is_warming else ()
        self.most_used = MostUsed(keys, verdict.is_pinning)
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
        """Count what was chosen since the last time; write it now and then, and what is last."""
        for choice in pager.take_uses():
            self._counter.add(choice.layer, choice.token_count, choice.experts)
        self._pending.add(self._counter.take(is_last=is_last))
        now = time.monotonic()
        if self._pending.windows and (is_last or now >= self._next_writing):
            self._next_writing = now + _SECONDS_BETWEEN
            self._keep(2.0 if is_last else 0.0)

    def _keep(self, seconds: float) -> None:
        if self._has_failed:
            return
        try:
            if self._store.add(self._pending.windows, seconds):
                self._pending = self._store.new()
        except MoepackError as error:
            self._has_failed = True
            self._notice(f"what was learned is not kept: {error}")


def make_learner(
    pack: Pack, *, learn: bool = True, notice: Notice = lambda text: None
) -> Learner | None:
    """Return what learns from a run of the model in `pack`.

    None where that is switched off, by `learn` or VARIABLE, and where the user has no folder.
    """
    if not learn or not is_learning(os.environ):
        return None
    try:
        store = LearnedStore(pack)
    except MachineError:
        return None  # as in a container without a home: nobody expects anything to be kept
    return Learner(store, notice)


def is_learning(environment: Mapping[str, str]) -> bool:
    """Return whether the variable switches nothing off."""
    return environment.get(VARIABLE, "").strip().lower() not in _NO
