"""The figures of a text: tokens, and the experts that its model needed for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import NamedTuple

from moepack.running.serving.client import Answer, AnswerFacts, End, PhaseFacts
from moepack.running.serving.model_server import ModelServer
from moepack.running.streaming.control import ExpertUsage, Prefetches


@dataclass(frozen=True, slots=True)
class RunPhase:
    """Figures of one phase: computing a prompt, or the tokens after it one by one.

    `step_count` is computed tokens; `hits` and `misses` are lookups of experts, `read_length` the
    bytes of the misses, `read_seconds` the model's wait for them. While all experts stay in memory
    lookups are not counted: then `hits` and `hit_rate` are None. `draft_hits` and `draft_misses`
    are those in layers for multi-token prediction.
    """

    step_count: int
    seconds: float
    tokens_per_second: float | None
    hits: int | None
    misses: int
    hit_rate: float | None
    read_length: int
    read_seconds: float
    draft_hits: int
    draft_misses: int

    @property
    def length_per_second(self) -> float | None:
        """The bytes that were read in a second, on average."""
        return self.read_length / self.seconds if self.seconds else None

    @property
    def read_share(self) -> float | None:
        """The share of the time that the model waited for experts."""
        return min(1.0, self.read_seconds / self.seconds) if self.seconds else None

    @property
    def length_per_token(self) -> float | None:
        """The bytes that were read for each token, on average."""
        return self.read_length / self.step_count if self.step_count else None


class MemoryFacts(NamedTuple):
    """The bytes that experts may take, the least that works, and the other parts of the memory.

    They are those of `MemoryParts`; None is unknown.
    """

    experts: int
    floor: int
    dense: int | None
    context: int | None
    computing: int | None
    texts: int | None
    program: int | None
    token_count: int | None
    total: int | None


@dataclass(frozen=True, slots=True)
class RunFacts(RunPhase):
    """A text and its figures. Besides `prompt`, phases are about the tokens after its first.

    `kept_count` tokens of the prompt were kept from an earlier text, the others were computed in
    batches of up to `batch_count`; `first_token_seconds` is from the request to the first token.
    The last of the text's `token_count` tokens, sampled with `seed`, needs no step. `thoughts`
    precede the answer. `draft_count` tokens were drafted, of which the text has `accepted_count`.
    `model_length` is the bytes of all tensors, `held_length` of the experts in memory,
    `fault_count` accesses to experts that no router had announced. Of its `prefetches`, and those
    of prompts, `wasted_length` bytes were not used. `rechecked_count` experts that were right when
    they were first read were compared with their digests again.
    """

    text: str
    thoughts: str
    end: End
    token_count: int
    prompt_count: int
    kept_count: int
    batch_count: int
    first_token_seconds: float | None
    prompt: RunPhase
    model_length: int
    memory: MemoryFacts
    held_length: int
    fault_count: int
    prefetches: Prefetches
    wasted_length: int
    policy: str
    seed: int
    draft_count: int
    accepted_count: int
    rechecked_count: int


@contextlib.contextmanager
def measure(
    server: ModelServer, ask: Callable[[], AbstractContextManager[Answer]]
) -> Iterator[MeasuredAnswer]:
    """Ask `server` something, and measure the answer.

    Raises the error for experts that could not be read, and what `ask` and its answer raise.
    """
    server.supervisor.begin_request()
    before = server.usage
    with server.expert_failures(), ask() as answer:
        yield MeasuredAnswer(answer, server, before)


class MeasuredAnswer:
    """An answer of `server` with its figures, for one iteration.

    `before` is the usage before its request. Reads until its first token count for the prompt.
    """

    def __init__(self, answer: Answer, server: ModelServer, before: ExpertUsage) -> None:
        self._answer, self._server, self._before = answer, server, before
        self._first: ExpertUsage | None = None
        self._routed_before: int | None = None
        """Tokens routed before the prompt's: a cancelled text may still have been computed."""
        answer.on_event = self._note

    def _note(self, facts: AnswerFacts) -> None:
        if self._routed_before is None:
            self._routed_before = self._server.usage.routed_count
        if self._first is None and facts.token_count:
            self._first = self._server.usage

    def __iter__(self) -> Iterator[str]:
        return iter(self._answer)

    @property
    def so_far(self) -> RunPhase:
        """The figures of the current phase: the prompt, or the tokens after its first."""
        now, facts = self._server.usage, self._answer.facts
        if self._first is None:
            return _phase(facts.prompt, self._before, now)
        return _phase(facts, self._first, now)

    @property
    def prompt_progress(self) -> tuple[int, int] | None:
        """The number of computed tokens of the prompt, and of all; None before it is known.

        The server reports them after each batch; in between the routed tokens are counted.
        """
        facts = self._answer.facts
        if not facts.prompt_count or self._routed_before is None:
            return None
        total = facts.prompt_count - facts.kept_count
        routed = self._server.usage.routed_count - self._routed_before
        return max(facts.processed_count - facts.kept_count, min(routed, total)), total

    @property
    def facts(self) -> RunFacts:
        """The text and its figures so far."""
        now, answer = self._server.usage, self._answer.facts
        first = self._first or now
        pack = self._server.pack
        shape, floor = pack.shape.without_mtp(), self._server.supervisor.floor
        return RunFacts(
            **asdict(_phase(answer, first, now)),
            text=answer.text,
            thoughts=answer.thoughts,
            end=answer.end,
            token_count=answer.token_count,
            prompt_count=answer.prompt_count,
            kept_count=answer.kept_count,
            batch_count=self._server.micro_batch,
            first_token_seconds=answer.first_token_seconds,
            prompt=_phase(answer.prompt, self._before, first),
            model_length=sum(one.length for one in pack.dense()) + shape.expert_length,
            memory=self._memory(max(floor, min(now.budget, shape.expert_length)), floor),
            held_length=now.expert_length,
            fault_count=now.fault_count - self._before.fault_count,
            prefetches=now.prefetches.since(self._before.prefetches),
            wasted_length=now.wasted_length - self._before.wasted_length,
            policy=self._server.policy,
            seed=answer.seed,
            draft_count=answer.draft_count,
            accepted_count=answer.accepted_count,
            rechecked_count=now.rechecked_count - self._before.rechecked_count,
        )

    def _memory(self, experts: int, floor: int) -> MemoryFacts:
        parts = self._server.supervisor.parts._replace(experts=experts)
        return MemoryFacts(floor=floor, total=parts.total, **parts._asdict())


def _phase(phase: PhaseFacts, start: ExpertUsage, end: ExpertUsage) -> RunPhase:
    hits = end.hit_count - start.hit_count
    misses = end.miss_count - start.miss_count
    lookups = hits + misses
    is_counted = not (start.holds_all or end.holds_all)
    return RunPhase(
        step_count=phase.step_count,
        seconds=phase.seconds,
        tokens_per_second=phase.tokens_per_second,
        hits=hits if is_counted else None,
        misses=misses,
        hit_rate=hits / lookups if is_counted and lookups else None,
        read_length=end.read_length - start.read_length,
        read_seconds=end.read_seconds - start.read_seconds,
        draft_hits=end.draft_hit_count - start.draft_hit_count,
        draft_misses=end.draft_miss_count - start.draft_miss_count,
    )
