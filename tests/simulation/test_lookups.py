"""Lookups are those of a plain walk over the calls, however a trace is cut into pieces."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moepack.keys import ExpertKey
from moepack.simulation.lookups import Lookups, LookupStream
from moepack.trace.model import Phase
from tests.support.routing import LAYERS, RoutedCall, items_of, routing, steps_of


@given(
    calls=routing(),
    piece_length=st.integers(1, 30),
    batch_count=st.one_of(st.none(), st.integers(1, 4)),
)
def test_each_step_looks_up_each_of_its_experts_once_in_the_order_of_last_choices(
    calls: list[RoutedCall], piece_length: int, batch_count: int | None
) -> None:
    found: list[Lookups] = []
    stream = LookupStream(found.append, range(LAYERS), batch_count)
    for item in items_of(calls, piece_length):
        stream.add(item)
    stream.end()
    expected = []
    requests = {request: n for n, request in enumerate(dict.fromkeys(c.request for c in calls))}
    for step, (call, number, keys) in enumerate(steps_of(calls, batch_count)):
        counts = Counter(keys)
        for key in list(dict.fromkeys(reversed(keys)))[::-1]:
            is_decode = call.phase is Phase.DECODE
            row = (requests[call.request], number, step, key.layer, key, counts[key], is_decode)
            expected.append(row)
    rows = []
    for lookups in found:
        layers, experts = stream.places.keys(lookups.place)
        keys = [ExpertKey(*pair) for pair in zip(layers.tolist(), experts.tolist(), strict=True)]
        columns = (column.tolist() for column in lookups._replace(place=np.arange(len(keys))))
        rows += [(*row[:4], keys[row[4]], *row[5:]) for row in zip(*columns, strict=True)]
    assert rows == expected
    assert stream.decode_token_count == sum(call.phase is Phase.DECODE for call in calls)
    assert stream.token_count == sum(len(call.tokens) for call in calls)
