"""A drive that only calculates how long its reads would take, with the weather of a bad machine.

Bytes come from the real files, at once; a clock of its own says what they took. So what is faster
there is known, and a minute of measuring is over in a moment.
"""

import contextlib
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moepack.bench.disturbance import Disturbance
from moepack.storage import page_cache
from moepack.storage.backend import Completion, ReadRequest

_TICK = 1e-6
"""Seconds that asking for the time takes: what the drive does not do takes time as well."""


@dataclass(frozen=True)
class Weather:
    """What disturbs a drive.

    Each read takes `noise` more or less (the deviation of a logarithm), and `outlier_share` of them
    take `outlier` times as long. Over `drift_seconds` the drive gets half as fast. There are bad
    phases of `phase_seconds` in the mean, `bad_share` of all: everything takes `slow` times as long
    then, and what `factor` slows `crowded` times that, since others read the drive as well.
    """

    noise: float = 0.0
    outlier: float = 1.0
    outlier_share: float = 0.01
    drift_seconds: float = math.inf
    phase_seconds: float = math.inf
    bad_share: float = 0.0
    slow: float = 1.0
    crowded: float = 1.0


CALM = Weather()
NOISY = Weather(noise=0.1, outlier=20)
ROUGH = Weather(noise=0.1, outlier=20, drift_seconds=90, phase_seconds=6, bad_share=0.5, slow=2)
CROWDED = Weather(noise=0.1, outlier=20, phase_seconds=6, bad_share=0.4, slow=1.2, crowded=1.7)
"""As measured where others read the drive now and then: many small reads get less of it."""


@contextlib.contextmanager
def nothing_is_cached() -> Iterator[None]:
    """Leave the page cache alone: dropping real files syncs them, and this drive has no cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_cache, "drop", lambda paths: None)
        yield


class SyntheticDrive:
    """Takes `latency` + length / `bandwidth` for a read, one after another but for the latency.

    Files that are `slowed` take `factor` times as long.
    """

    def __init__(
        self,
        seed: int,
        weather: Weather,
        factor: float,
        is_slowed: Callable[[Path], bool] = lambda _: False,
        latency: float = 100e-6,
        bandwidth: float = 2e9,
    ) -> None:
        self._draw = random.Random(seed)
        self._weather = weather
        self._is_slowed = is_slowed
        self._factor = factor
        self._latency = latency
        self._bandwidth = bandwidth
        self._time = self._bus_free = self._phase_end = 0.0
        self._is_bad = False
        self._asked_at = self._crowded_seconds = 0.0
        self.requests: list[ReadRequest] = []

    def clock(self) -> float:
        self._time += _TICK
        return self._time

    def disturbance(self) -> Disturbance:
        """Return how much of the time since the last call was crowded."""
        share = self._crowded_seconds / max(self._time - self._asked_at, _TICK)
        self._asked_at, self._crowded_seconds = self._time, 0.0
        return Disturbance(share / 2, None)

    def backend(self, depth: int) -> "SyntheticBackend":
        return SyntheticBackend(self)

    def pass_time(self, until: float) -> None:
        if self._is_bad and self._weather.crowded > 1:
            self._crowded_seconds += max(0.0, until - self._time)
        self._time = max(self._time, until)

    def ends(self, path: Path, length: int) -> float:
        """Begin a read now; return when it ends."""
        takes = self.takes(self._is_slowed(path))
        ready = max(self._time + self._latency * takes, self._bus_free)
        self._bus_free = ready + length / self._bandwidth * takes
        return self._bus_free

    def takes(self, slowed: bool) -> float:
        """Return how many times as long as in calm weather something takes now."""
        weather = self._weather
        while self._time >= self._phase_end:
            self._is_bad = self._draw.random() < weather.bad_share
            self._phase_end += self._draw.expovariate(1) * weather.phase_seconds
        takes = math.exp(self._draw.gauss(0, weather.noise))
        takes *= self._factor if slowed else 1
        takes *= weather.outlier if self._draw.random() < weather.outlier_share else 1
        takes *= 1 + self._time / weather.drift_seconds
        if self._is_bad:
            takes *= weather.slow * (weather.crowded if slowed else 1)
        return takes


class SyntheticBackend:
    """Reads with plain reads, and asks the drive what that takes."""

    name = "synthetic"

    def __init__(self, drive: SyntheticDrive) -> None:
        self._drive = drive
        self._files: dict[Path, int] = {}

    def read(self, request: ReadRequest) -> Completion:
        completion, end = self.begin(0, request)
        self._drive.pass_time(end)
        return completion

    def queue(self, depth: int) -> "SyntheticQueue":
        return SyntheticQueue(self, self._drive)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def begin(self, number: int, request: ReadRequest) -> tuple[Completion, float]:
        path, offset, buffer, more = request
        self._drive.requests.append(request)
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        length = os.preadv(self._files[path], [buffer, *more], offset)
        return Completion(number, length, None), self._drive.ends(path, length)


class SyntheticQueue:
    """Requests in flight, by when they end."""

    def __init__(self, backend: SyntheticBackend, drive: SyntheticDrive) -> None:
        self._backend = backend
        self._drive = drive
        self._in_flight: list[tuple[Completion, float]] = []

    def start(self, requests: Iterable[tuple[int, ReadRequest]]) -> None:
        self._in_flight += [self._backend.begin(*request) for request in requests]

    def finished(self, *, wait: bool) -> list[Completion]:
        if not self._in_flight:
            return []
        first = min(self._in_flight, key=lambda one: one[1])
        if wait:
            self._drive.pass_time(first[1])
        elif first[1] > self._drive.clock():
            return []
        self._in_flight.remove(first)
        return [first[0]]

    def fileno(self) -> int:
        """Have none: nobody waits for it here."""
        raise NotImplementedError

    def close(self) -> None:
        self._in_flight.clear()
