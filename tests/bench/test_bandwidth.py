"""The bandwidth of memory: its measurement, and the buffer."""

import itertools

import pytest

from moepack.bench import bandwidth
from moepack.bench.bandwidth import measure_bandwidth
from moepack.planning.machine.model import Figure

MIB = 1 << 20


def test_a_round_is_all_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each round takes 10 ms."""
    monkeypatch.setattr(bandwidth, "buffer_length", lambda *_: 4 * MIB)
    monkeypatch.setattr(bandwidth, "cpu_count", lambda: 2)
    ticks = itertools.count()
    rounds: list[None] = []
    figure = measure_bandwidth(
        0.5, clock=lambda: next(ticks) / 100, progress=lambda: rounds.append(None)
    )
    speed = 400 * MIB
    assert figure == Figure(speed, "measured", speed, speed)
    assert len(rounds) >= 3 + 3 + 5
    assert 50 <= next(ticks) <= 55, "until the time is over"


def test_without_memory_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "available_memory", lambda: 100 * MIB)
    assert measure_bandwidth(0) is None


def test_the_memory_of_this_machine_is_slower_than_its_caches_and_faster_than_drives() -> None:
    figure = measure_bandwidth(0)
    if figure is None:
        pytest.skip("there is too little memory here")
    assert 0.5e9 < (figure.lowest or 0) <= figure.value <= (figure.highest or 0) < 20e12
