"""Sessions: the requests of a trace as if several ran at once, taking turns call by call."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from moepack.traces.simulation.lookups import Lookups, joined, steps_of
from moepack.traces.spool import Spool

_CALL_COUNT = 1024
"""Calls that are passed on at once."""


def interleaved(spool: Spool, session_count: int) -> Iterator[Lookups]:
    """Yield the lookups of a spool, `session_count` requests at a time in turns.

    When one ends, the next of the trace takes its turn. Calls and steps are numbered anew. Memory
    is for the requests that run.
    """
    waiting = (request.divided(request.call) for request in _requests(spool))
    running = deque(islice(waiting, session_count))
    calls: list[Lookups] = []
    call_count = step_count = 0
    while running:
        session = running.popleft()
        call = next(session, None)
        if call is not None:
            running.append(session)
            calls.append(call)
        else:
            running.extendleft(islice(waiting, 1))
        if len(calls) == _CALL_COUNT or (calls and not running):
            numbered = _numbered(calls, call_count, step_count)
            call_count, step_count = call_count + len(calls), int(numbered.step[-1]) + 1
            calls = []
            yield numbered


def _requests(spool: Spool) -> Iterator[Lookups]:
    """Yield the lookups of one request after another."""
    parts: list[Lookups] = []
    for lookups in map(Lookups._make, spool):
        for part in lookups.divided(lookups.request):
            if parts and parts[0].request[0] != part.request[0]:
                yield joined(parts)
                parts = []
            parts.append(part)
    if parts:
        yield joined(parts)


def _numbered(calls: Sequence[Lookups], first_call: int, first_step: int) -> Lookups:
    numbers = np.arange(first_call, first_call + len(calls))
    call = np.repeat(numbers, [one.lookup_count for one in calls])
    lookups = joined(calls)._replace(call=call)
    return lookups._replace(step=steps_of(lookups, first_step))
