"""Text from a model, as it comes, and what it took."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from moepack.errors import RequestError
from moepack.llama_cpp.decoding import Chosen
from moepack.llama_cpp.sampling import Sampling
from moepack.running.engine import Engine, MemoryUse

End = Literal["stop", "length", "context", "left"]
"""Why a text ends: the model ended it, or a stop text did; as many tokens as asked; the context is
full; nobody wanted more of it."""


@dataclass(frozen=True, slots=True)
class PhaseFacts:
    """What one phase took: computing a prompt, or the tokens after it one by one.

    `step_count` is tokens; `hits` and `misses` are lookups in the cache of experts, `read_length`
    the bytes of what was missing, `read_seconds` how long the model waited for them. `prefetched`
    of the misses were on their way already; `wasted_length` are bytes that were read ahead in vain.
    """

    step_count: int
    seconds: float
    tokens_per_second: float | None
    hits: int
    misses: int
    hit_rate: float | None
    read_length: int
    read_seconds: float
    prefetched: int
    wasted_length: int

    @property
    def length_per_second(self) -> float | None:
        """The bytes that were read in a second, on average."""
        return (self.read_length + self.wasted_length) / self.seconds if self.seconds else None

    @property
    def read_share(self) -> float | None:
        """The share of the time in which the model waited for experts."""
        return self.read_seconds / self.seconds if self.seconds else None

    @property
    def length_per_token(self) -> float | None:
        """The bytes that were read for each token; None where there was none."""
        return self.read_length / self.step_count if self.step_count else None


@dataclass(frozen=True, slots=True)
class GenerationFacts(PhaseFacts):
    """What became of a text. Besides `prompt`, phases are about the tokens after its first.

    `kept_count` tokens of the prompt were there from before, the others were computed in batches of
    up to `batch_count`. `token_count` are those of the text, of which the last needs no step.
    `model_length` is the bytes of all tensors of the model.
    """

    text: str
    end: End
    token_count: int
    prompt_count: int
    kept_count: int
    batch_count: int
    prompt: PhaseFacts
    model_length: int
    memory: MemoryUse
    held_length: int
    policy: str
    backend: str


_NOTHING = PhaseFacts(0, 0.0, None, 0, 0, None, 0, 0.0, 0, 0)


class _LeftError(Exception):
    """Nobody wants more of a text."""


class Generation:
    """A text that a model goes on with, piece by piece; to be iterated over once.

    What the engine holds is gone on with as far as it begins as the prompt does. The next prompt is
    expected to begin with the first `stable_count` tokens of this one, by default all of them: the
    engine will be able to go back there. `facts` are there once it has ended, also when it was left
    early. `chose` is called after each call of the model with its tokens and choices, and whether
    they are the prompt's.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        *,
        count: int | None = None,
        sampling: Sampling = Sampling(),
        stops: Sequence[str] = (),
        stable_count: int | None = None,
        chose: Callable[[Sequence[int], Chosen, bool], None] = lambda tokens, chosen, first: None,
    ) -> None:
        if not prompt:
            raise RequestError("the prompt is empty")
        if not len(prompt) < engine.options.context:
            raise RequestError(
                "the prompt does not fit into the context",
                expected=f"up to {engine.options.context - 1:,} tokens",
                found=f"{len(prompt):,}",
                hint="give it more with --context",
            )
        if count is not None and count < 1:
            raise RequestError("no tokens are asked for", expected="1 or more", found=count)
        sampling.check()
        self._engine = engine
        self._prompt = list(prompt)
        self._stable_count = len(prompt) if stable_count is None else stable_count
        self._count = count
        self._sampling = sampling
        self._text = _Text(stops)
        self._chose = chose
        self._end: End = "left"
        self._kept_count = self._token_count = 0
        self._phases: list[PhaseFacts] = []
        self._phase: _Phase | None = None

    def __iter__(self) -> Iterator[str]:
        return self.pieces(lambda: False)

    def pieces(self, is_left: Callable[[], bool]) -> Iterator[str]:
        """Yield the pieces of the text until it ends, or `is_left` says that nobody wants more.

        It is asked after each call of the model.
        """
        try:
            yield from self._pieces(is_left)
        except _LeftError:
            return

    def _pieces(self, is_left: Callable[[], bool]) -> Iterator[str]:
        engine, prompt = self._engine, self._prompt

        def computed(tokens: Sequence[int], chosen: Chosen, is_prompt: bool) -> None:
            self._chose(tokens, chosen, is_prompt)
            if is_left():
                raise _LeftError

        # The last token is computed in any case: what comes after it is what is asked for.
        self._kept_count = min(common_count(engine.tokens, prompt), len(prompt) - 1)
        engine.rewind(self._kept_count)
        self._kept_count = len(engine.tokens)
        with self._begin_phase():
            self._feed_prompt(lambda tokens, chosen: computed(tokens, chosen, True))
        with self._begin_phase():
            yield from self._go_on(lambda tokens, chosen: computed(tokens, chosen, False))

    def _feed_prompt(self, computed: Callable[[Sequence[int], Chosen], None]) -> None:
        engine, prompt, start = self._engine, self._prompt, self._kept_count
        if engine.checkpoint_length and self._stable_count > start:
            engine.feed(prompt[start : self._stable_count], computed)
            engine.save_checkpoint()
            start = self._stable_count
        if start < len(prompt):
            engine.feed(prompt[start:], computed)

    def _go_on(self, computed: Callable[[Sequence[int], Chosen], None]) -> Iterator[str]:
        engine = self._engine
        with engine.sampler(self._sampling) as choose:
            while True:
                token = choose()
                if engine.vocabulary.ends(token):
                    self._end = "stop"
                    break
                self._token_count += 1
                yield from self._text.add(engine.vocabulary.text_of(token))
                if self._text.is_stopped:
                    self._end = "stop"
                    return
                if self._token_count == self._count:
                    self._end = "length"
                    break
                if not engine.room:
                    self._end = "context"
                    break
                engine.feed([token], computed)
        yield from self._text.rest()

    def _begin_phase(self) -> _Phase:
        self._phase = _Phase(self._engine, self._phases.append)
        return self._phase

    @property
    def text(self) -> str:
        """The text so far."""
        return self._text.whole

    @property
    def so_far(self) -> PhaseFacts:
        """What the phase took so far that it is in: the prompt, or the tokens after its first."""
        return _NOTHING if self._phase is None else self._phase.facts()

    @property
    def has_facts(self) -> bool:
        """Whether it has ended, or was left, after it had begun."""
        return bool(self._phases)

    @property
    def facts(self) -> GenerationFacts:
        """What became of it. Raises RequestError before it has ended."""
        if not self._phases:
            raise RequestError("the text has not ended")
        engine = self._engine
        prompt, decode = (*self._phases, _NOTHING)[:2]
        return GenerationFacts(
            **asdict(decode),
            text=self._text.whole,
            end=self._end,
            token_count=self._token_count,
            prompt_count=len(self._prompt),
            kept_count=self._kept_count,
            batch_count=engine.batch_count,
            prompt=prompt,
            memory=engine.memory,
            model_length=engine.model_length,
            held_length=engine.held_length,
            policy=engine.options.policy,
            backend=engine.reader.backend,
        )


class _Phase:
    """Measures what an engine does within a `with`."""

    def __init__(self, engine: Engine, ended: Callable[[PhaseFacts], None]) -> None:
        self._engine = engine
        self._ended = ended

    def _now(self) -> tuple[int, int, int, int, int, int, float, float]:
        usage, tally = self._engine.usage, self._engine.usage.tally
        counts = len(self._engine.tokens), tally.hit_count, tally.miss_count, tally.missed_length
        prefetched = usage.prefetched_count, usage.wasted_length
        return (*counts, *prefetched, usage.seconds, time.perf_counter())

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *exception: object) -> None:
        self._ended(self.facts())

    def facts(self) -> PhaseFacts:
        """Return what it took up to now."""
        now = self._now()
        count, hits, misses, length, prefetched, wasted, read_seconds, seconds = (
            after - before for before, after in zip(self._began, now, strict=True)
        )
        return PhaseFacts(
            step_count=int(count),
            seconds=seconds,
            tokens_per_second=count / seconds if count else None,
            hits=int(hits),
            misses=int(misses),
            hit_rate=hits / (hits + misses) if hits + misses else None,
            read_length=int(length),
            read_seconds=read_seconds,
            prefetched=int(prefetched),
            wasted_length=int(wasted),
        )


class _Text:
    """Puts pieces of bytes together to whole characters, and ends before a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._given: list[str] = []
        self.is_stopped = False

    @property
    def whole(self) -> str:
        """All that was given."""
        return "".join(self._given)

    def add(self, data: bytes, *, is_last: bool = False) -> Iterator[str]:
        """Give what can be no part of a stop text."""
        self._held += self._decoder.decode(data, is_last)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = self._held[: min(found)]
        kept = 0 if found or is_last else self._beginning()
        text = self._held[: len(self._held) - kept]
        self._held = self._held[len(text) :]
        if text:
            self._given.append(text)
            yield text

    def rest(self) -> Iterator[str]:
        """Give what was held back."""
        yield from self.add(b"", is_last=True)

    def _beginning(self) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        return max(
            (
                count
                for stop in self._stops
                for count in range(1, len(stop))
                if self._held.endswith(stop[:count])
            ),
            default=0,
        )


def common_count(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        count += 1
    return count
