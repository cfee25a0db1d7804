"""What reading takes on a machine: from its figures by what is known of engines, then by receipts.

The time of a token is a sum: of bytes from VRAM, memory, drive and a GPU's link, each over what is
reached of that bandwidth, and a fixed cost for each layer. What is reached is known with a doubt,
as a normal distribution of five factors; a receipt narrows it (Bayesian linear regression, exact
and in any order). So one receipt, two, or a sweep need no rules of their own, and the doubt about a
forecast follows from how far it is from them.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from moepack.forecasting.reads import Kind, Reads
from moepack.machine.model import Figure, Machine

SURE = 1.645
"""Standard deviations on both sides that hold 90 % of a normal distribution."""

READ_DEPTH = 4
"""Reads that streaming engines keep in flight, on average 3 to 4."""


class Reached(NamedTuple):
    """The share of a bandwidth that engines reach, and its doubt as a share of the time."""

    share: float
    doubt: float


# Fitted to published runs; docs/numbers.md says to which, and how well it holds for those that
# were left out.
_VRAM = Reached(1 / 1.15, 0.1)
_MEMORY: dict[tuple[Kind, bool], Reached] = {  # by whether the bandwidth was measured
    ("offload", True): Reached(0.9, 0.1),
    ("offload", False): Reached(0.48, 0.45),
    ("cpu", True): Reached(0.75, 0.25),
    ("cpu", False): Reached(0.4, 0.7),
    ("stream", True): Reached(0.75, 0.25),
    ("gpu-stream", True): Reached(0.9, 0.1),
    ("gpu-stream", False): Reached(0.48, 0.45),
    ("stream", False): Reached(0.4, 0.7),
}
_DRIVE = {True: Reached(0.8, 0.3), False: Reached(0.7, 0.5)}
_LINK = Reached(0.4, 0.5)
_LINK_BANDWIDTH = 25e9
"""Bytes a second where nobody says more, PCIe 4.0 of 16 lanes or a little less: pages of a file
that is mapped go through the driver's own buffer, which takes half of it or more."""
_LAYER_SECONDS: dict[Kind, tuple[float, float]] = {  # and the doubt as a share of it
    "gpu": (100e-6, 0.85),
    "offload": (100e-6, 0.85),
    "cpu": (50e-6, 1.0),
    "stream": (50e-6, 1.0),
    "gpu-stream": (100e-6, 0.85),
}
_UNKNOWN_RATES = Reads(0, vram=1 / 300e9, memory=1 / 20e9, drive=1 / 2e9, link=0.0)
"""Seconds a byte where no figure is known: only so that receipts have something to correct."""
_UNKNOWN_DOUBT = 3.0
_LEAST_SHARE = 1e-3
"""Of the first guess: receipts that contradict each other may say that a token takes no time."""
_MOST_FACTOR = 1e3
_MOST_TIMES = 2.0
"""Times as slow as guessed, up to which the doubt about a receipt grows with its time."""


class Estimate(NamedTuple):
    """Seconds, and their standard deviation."""

    seconds: float
    deviation: float

    @property
    def factor(self) -> float:
        """By how many times the truth may be more or less, in nine cases of ten."""
        return math.exp(min(SURE * self.deviation / self.seconds, math.log(_MOST_FACTOR)))


class Rates:
    """What reading takes.

    `units` are seconds a layer, and seconds a byte of VRAM, memory, drive and link: the best guess
    from figures. `factors` says by how much each of them is to be corrected, `covariance` [5, 5]
    how sure that is. `is_known` [5] are those that a figure, or a receipt, says something about.
    """

    def __init__(
        self,
        units: NDArray[np.float64],
        factors: NDArray[np.float64],
        covariance: NDArray[np.float64],
        is_known: tuple[bool, ...],
    ) -> None:
        self._units = units
        self._factors = factors
        self._covariance = covariance
        self._is_known = is_known

    @classmethod
    def of(cls, machine: Machine, kind: Kind, read_length: int) -> Self:
        """Guess what reading takes on a machine, for reads of so many bytes of its drive."""
        gpu = machine.vram_bandwidth
        drive = None if machine.drive is None else machine.drive.speed(read_length, READ_DEPTH)
        memory = machine.memory_bandwidth
        guesses = [
            _LAYER_SECONDS[kind],
            _guess(gpu, _VRAM, _UNKNOWN_RATES.vram),
            _guess(memory, _memory(kind, memory), _UNKNOWN_RATES.memory),
            _guess(drive, _DRIVE[_is_measured(drive)], _UNKNOWN_RATES.drive),
            _guess(machine.link or Figure(_LINK_BANDWIDTH, "typed"), _LINK, 0.0),
        ]
        units, doubts = (np.array(values) for values in zip(*guesses, strict=True))
        known = (True, gpu is not None, memory is not None, drive is not None, True)
        return cls(units, np.ones(len(units)), np.diag(doubts**2), known)

    def learned(self, reads: Reads, seconds: float, doubt: float) -> Self:
        """Return the rates after a receipt: what was read, and the seconds that a token took.

        `doubt` is by what share such a measurement differs from the next one.
        """
        terms = self._units * reads
        spread = self._covariance @ terms
        # Of a machine much slower than was guessed, the measurement is to win against the guess.
        scale = min(seconds, _MOST_TIMES * float(terms.sum()))
        variance = float(terms @ spread) + (doubt * scale) ** 2
        gain = spread / variance
        return type(self)(
            self._units,
            self._factors + gain * (seconds - float(terms @ self._factors)),
            self._covariance - np.outer(gain, spread),
            tuple(known or bool(term) for known, term in zip(self._is_known, terms, strict=True)),
        )

    def terms(self, reads: Reads) -> tuple[float | None, ...]:
        """Return the seconds of each term of a token: of the layers, VRAM, memory, drive, link.

        None where nothing is known of what it needs.
        """
        terms = self._units * self._factors * reads
        return tuple(
            max(0.0, float(term)) if known or not length else None
            for term, known, length in zip(terms, self._is_known, reads, strict=True)
        )

    def estimate(self, reads: Reads, doubt: float, least: float) -> Estimate | None:
        """Return the time of a token: at least `least`, which the bandwidths themselves demand.

        `doubt` is by what share a run differs from what its terms say. None where a term is not
        known.
        """
        if None in self.terms(reads):
            return None
        terms = self._units * reads
        seconds = max(least, float(terms @ self._factors), _LEAST_SHARE * float(terms.sum()))
        variance = float(terms @ self._covariance @ terms) + (doubt * seconds) ** 2
        return Estimate(seconds, math.sqrt(variance))


def ceiling_seconds(machine: Machine, reads: Reads, read_length: int) -> float | None:
    """Return the time of a token if each bandwidth were reached, and nothing else took any.

    None where one of them is not known; a link that is not known takes no time.
    """
    drive = None if machine.drive is None else machine.drive.speed(read_length, READ_DEPTH)
    link = machine.link or Figure(math.inf, "typed")
    bandwidths = (machine.highest_vram_bandwidth, machine.memory_bandwidth, drive, link)
    seconds = 0.0
    for length, bandwidth in zip(reads[1:], bandwidths, strict=True):
        if length:
            if bandwidth is None:
                return None
            seconds += length / bandwidth.value
    return seconds


def _guess(figure: Figure | None, reached: Reached, unknown: float) -> tuple[float, float]:
    """Return seconds a byte, and their doubt."""
    if figure is None:
        return unknown, _UNKNOWN_DOUBT
    return 1 / (reached.share * figure.value), reached.doubt


def _memory(kind: Kind, figure: Figure | None) -> Reached:
    return _MEMORY["offload" if kind == "gpu" else kind, _is_measured(figure)]


def _is_measured(figure: Figure | None) -> bool:
    return figure is not None and figure.basis == "measured"
