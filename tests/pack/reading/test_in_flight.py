"""The limits of a reader: so many reads and bytes in flight, no fewer and no more."""

import threading

import pytest

from moepack.pack.reading.pack import Pack
from tests.support.faulty_backend import Fault, FaultyBackend, make
from tests.support.models import on_disk


def gated() -> tuple[FaultyBackend, threading.Event]:
    """Make a backend on which reads wait for an event."""
    gate = threading.Event()
    return FaultyBackend(make("buffered"), Fault(until=gate)), gate


def test_batches_share_the_depth(pack: Pack) -> None:
    backend, gate = gated()
    with pack.reader(backend=backend, depth=4) as reader:
        batches = []
        for layer, count, expected in ((0, 3, 3), (1, 5, 4), (0, 2, 5)):
            batches.append(reader.submit([(layer, n) for n in range(count)]))
            # The first of a batch is never held back.
            assert len(backend.begun) == expected == reader.statistics.in_flight_count
        gate.set()
        for batch in batches:
            for one in batch.completions():
                assert one.view == on_disk(pack.locate(one.layer, one.expert))
        assert backend.peak_count == 5


@pytest.mark.parametrize(("beyond", "expected"), [(0, 2), (-1, 1), (1, 2)])
def test_as_many_bytes_as_the_bound_says_are_in_flight(
    pack: Pack, beyond: int, expected: int
) -> None:
    backend, gate = gated()
    length = pack.locate(0, 0).length
    reader = pack.reader(backend=backend, max_in_flight=2 * length + beyond)
    with reader, reader.submit([(0, n) for n in range(4)]):
        assert len(backend.begun) == expected
        assert reader.statistics.in_flight_length == expected * length
        gate.set()


def test_what_waits_begins_when_an_expert_is_taken_and_not_only_with_the_next(pack: Pack) -> None:
    backend, gate = gated()
    reader = pack.reader(backend=backend, depth=2)
    with reader, reader.submit([(0, n) for n in range(6)]) as batch:
        assert len(backend.begun) == 2
        gate.set()
        next(batch.completions())
        assert len(backend.begun) in (3, 4)
