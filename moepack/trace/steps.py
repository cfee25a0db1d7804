"""Steps: a trace as what a model computes one after another, the same for all that measure it.

A step is one call of the model: all tokens of a prefill, or one token of a decode. Requests are
numbered here over all files of a trace, and phases are chosen here, so that whoever counts
selections, windows or cache hits looks at the same tokens.
"""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moepack.trace.model import Bytes, Ints, Item, Origin, Phase, Shorts, Tokens

Truths = NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

ALL_PHASES = frozenset(Phase)
DECODE_PHASES = frozenset({Phase.DECODE, Phase.UNKNOWN})
"""Decode, and what may be decode: where a trace does not tell phases, nothing is left out."""


class Steps(NamedTuple):
    """Some tokens of a trace in their order, of the phases that were asked for.

    `request` [tokens] numbers requests from 0 over the whole trace. `is_first` [tokens] says
    whether a token begins its request, `begins_step` [tokens] whether it begins a step. The
    selections of token t are `layer[starts[t]:starts[t + 1]]` and `expert[…]`, in the order in
    which the model meets them.
    """

    request: Ints
    is_first: Truths
    begins_step: Truths
    phase: Bytes
    starts: Ints
    layer: Shorts
    expert: Shorts

    @property
    def token_count(self) -> int:
        """How many tokens there are."""
        return len(self.request)

    def of_selections(self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """Return for each selection the value of its token."""
        return np.repeat(values, np.diff(self.starts))


class StepStream:
    """Turns the pieces of a trace, as they come, into steps, in constant memory.

    `phases` are those that are wanted. Of a longer trace the first `most_tokens` tokens of them
    are taken.
    """

    def __init__(
        self, phases: frozenset[Phase] = DECODE_PHASES, most_tokens: int | None = None
    ) -> None:
        self._phases = phases
        self._most_tokens = most_tokens
        self._origin_count = 0
        self._last_request: tuple[int, int] | None = None
        self._last_phase = Phase.UNKNOWN
        self.token_count = 0
        self.request_count = 0

    @property
    def is_full(self) -> bool:
        """Whether no further token will be taken."""
        return self._most_tokens is not None and self.token_count >= self._most_tokens

    def take(self, item: Item) -> Steps | None:
        """Return the steps in the next piece; None where it has none."""
        if isinstance(item, Origin):
            self._origin_count += 1
        if not isinstance(item, Tokens) or self.is_full:
            return None
        tokens = self._chosen(item)
        if not len(tokens.request):
            return None
        is_first = self._begins_request(tokens.request)
        request = self.request_count - 1 + np.cumsum(is_first)
        self.request_count += int(np.count_nonzero(is_first))
        self.token_count += len(request)
        phase_before = np.concatenate(([self._last_phase], tokens.phase[:-1]))
        self._last_phase = Phase(int(tokens.phase[-1]))
        goes_on = (tokens.phase == Phase.PREFILL) & (phase_before == Phase.PREFILL) & ~is_first
        columns = (tokens.phase, tokens.starts, tokens.layer, tokens.expert)
        return Steps(request, is_first, ~goes_on, *columns)

    def _chosen(self, tokens: Tokens) -> Tokens:
        chosen: Truths = np.isin(tokens.phase, [int(phase) for phase in self._phases])
        if self._most_tokens is not None:
            chosen &= np.cumsum(chosen) <= self._most_tokens - self.token_count
        if chosen.all():
            return tokens
        lengths = np.diff(tokens.starts)
        selected = np.repeat(chosen, lengths)
        return Tokens(
            tokens.request[chosen],
            tokens.phase[chosen],
            np.concatenate(([0], np.cumsum(lengths[chosen]))),
            tokens.layer[selected],
            tokens.expert[selected],
        )

    def _begins_request(self, request: Ints) -> Truths:
        """Say which tokens begin a request: numbers begin again in each file of a trace."""
        is_first = np.ones(len(request), np.bool_)
        is_first[1:] = request[1:] != request[:-1]
        is_first[0] = (self._origin_count, int(request[0])) != self._last_request
        self._last_request = (self._origin_count, int(request[-1]))
        return is_first
