"""The seconds that a token takes on a machine: by its figures, corrected by measured runs.

The time of a token is a sum: a fixed cost for each layer, one for each layer that waits for missing
experts, and bytes from VRAM, memory, drive and a GPU's link, each over an achieved fraction of that
bandwidth. The terms are known up to a normal distribution of their factors, which a measured run
narrows (Bayesian linear regression, exact and in any order). So one run, two, or a sweep need no
rules of their own, and the spread of a forecast follows from its distance to them.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from moepack.planning.machine.model import DriveSpeed, Figure, Machine

Kind = Literal["gpu", "offload", "cpu", "stream", "gpu-stream"]
"""The execution modes: whole in VRAM; the experts of some layers, or of all, in memory; everything
in memory; experts from a drive through a cache in memory, beside the rest; the same with the rest
in VRAM. The fraction of a bandwidth that one of them achieves says nothing of another (but `gpu` is
the end of `offload` with nothing in memory)."""

STREAMS: tuple[Kind, ...] = ("stream", "gpu-stream")
WITH_GPU: tuple[Kind, ...] = ("gpu", "offload", "gpu-stream")

KIND_WORDS: dict[Kind, str] = {
    "gpu": "whole in VRAM",
    "offload": "experts in memory, the rest in VRAM",
    "cpu": "whole in memory",
    "stream": "experts from the drive, the rest in memory",
    "gpu-stream": "experts from the drive, the rest in VRAM",
}

SURE = 1.645
"""Standard deviations on both sides that cover 90 % of a normal distribution."""

# Fractions of a bandwidth, and the relative standard deviation of the time; fitted to published
# runs: docs/numbers.md names them, and the errors for runs that were left out.
_VRAM = (1 / 1.15, 0.1)
_MEMORY = {  # by whether there is a GPU, and whether the bandwidth was measured
    (True, True): (0.9, 0.1),
    (True, False): (0.48, 0.45),
    (False, True): (0.72, 0.2),
    (False, False): (0.48, 0.45),
}
_WIDE_MEMORY, _OF_WIDE_MEMORY = 400e9, (0.3, 0.8)
"""Of a data sheet of more bytes a second processors reach less: two sockets have that, and unified
memory. The published runs on processors alone reach 0.50 and 0.57 of 42 and 96 GB/s, and 0.16 of
614 GB/s."""
_DRIVE = {True: (0.95, 0.3), False: (0.7, 0.5)}
_WAIT = {True: (1.0, 0.5), False: (1.0, 1.0)}
_LINK = (0.4, 0.5)
_LINK_BANDWIDTH = Figure(25e9, "typed")
"""If the machine states none, PCIe 4.0 of 16 lanes or a little less: pages of a mapped file go
through the driver's own buffer, which takes half of it or more."""
_LAYER_SECONDS: dict[Kind, tuple[float, float]] = {
    "gpu": (100e-6, 0.85),
    "offload": (100e-6, 0.85),
    "gpu-stream": (200e-6, 0.85),
    "cpu": (100e-6, 0.6),
    "stream": (220e-6, 0.5),
}
"""Of a layer beside its bytes. Where experts are streamed, llama.cpp computes it in two pieces."""
_UNKNOWN_REL_STD = 3.0
_LEAST_SHARE = 1e-3
"""Of the first guess: runs that contradict each other may say that a token takes no time."""
_MOST_FACTOR = 1e3
_MOST_TIMES = 2.0
"""The slowdown against the guess up to which the deviation of a run grows with its time."""


class Reads(NamedTuple):
    """The bytes that a decoded token reads of each memory, and the number of layers with experts.

    Missed experts are read of `drive`, and of `memory` as well; on average `wait_count` layers have
    some. `link` is the bytes from memory to a GPU that computes with them.
    """

    layer_count: int
    wait_count: float = 0.0
    vram: float = 0.0
    memory: float = 0.0
    drive: float = 0.0
    link: float = 0.0


_UNKNOWN_RATES = Reads(0, 0, vram=1 / 300e9, memory=1 / 20e9, drive=1 / 2e9)
"""Seconds a byte without a figure: only so that measured runs have something to correct."""


class Estimate(NamedTuple):
    """Seconds, and their standard deviation."""

    seconds: float
    deviation: float

    @property
    def factor(self) -> float:
        """The factor by which the truth may be more or less, in nine cases of ten."""
        return math.exp(min(SURE * self.deviation / self.seconds, math.log(_MOST_FACTOR)))


class Rates(NamedTuple):
    """The seconds of a layer, of a wait, and of a byte of VRAM, memory, drive and link.

    `units` are the best guess by figures. `factors` correct each of them, with the `covariance`
    [6, 6]. `is_known` [6] says for each whether a figure, or a run, tells anything about it.
    """

    units: NDArray[np.float64]
    factors: NDArray[np.float64]
    covariance: NDArray[np.float64]
    is_known: tuple[bool, ...]

    @classmethod
    def from_machine(cls, machine: Machine, kind: Kind, drive: DriveSpeed | None) -> Self:
        """Guess the rates of a machine, with the speed of its `drive` for a model's experts."""
        memory, has_gpu = machine.memory_bandwidth, kind in WITH_GPU
        bandwidth = drive and drive.bandwidth
        is_measured = _is_measured(bandwidth)
        figures = machine.vram_bandwidth, memory, bandwidth, machine.link or _LINK_BANDWIDTH
        of_memory = _MEMORY[has_gpu, _is_measured(memory)]
        if memory and memory.value > _WIDE_MEMORY and not _is_measured(memory):
            of_memory = _OF_WIDE_MEMORY
        achieved = _VRAM, of_memory, _DRIVE[is_measured], _LINK
        wait, wait_rel_std = _WAIT[is_measured]
        guesses = [_LAYER_SECONDS[kind], ((wait * drive.wait if drive else 0.0), wait_rel_std)]
        guesses += [
            (unknown, _UNKNOWN_REL_STD)
            if figure is None
            else (1 / (fraction * figure.value), rel_std)
            for figure, (fraction, rel_std), unknown in zip(
                figures, achieved, _UNKNOWN_RATES[2:], strict=True
            )
        ]
        units, rel_stds = (np.array(values) for values in zip(*guesses, strict=True))
        is_known = (True, True, *(figure is not None for figure in figures))
        return cls(units, np.ones(len(units)), np.diag(rel_stds**2), is_known)

    def updated(self, reads: Reads, seconds: float, rel_std: float) -> Self:
        """Return the rates after a measured run: its reads, and the seconds of a token.

        Such a measurement differs from the next one by `rel_std`.
        """
        terms = self.units * reads
        spread = self.covariance @ terms
        # On a machine much slower than guessed, the measurement is to win against the guess.
        scale = min(seconds, _MOST_TIMES * float(terms.sum()))
        variance = float(terms @ spread) + (rel_std * scale) ** 2
        gain = spread / variance
        return self._replace(
            factors=self.factors + gain * (seconds - float(terms @ self.factors)),
            covariance=self.covariance - np.outer(gain, spread),
            is_known=tuple(map(any, zip(self.is_known, terms, strict=True))),
        )

    def terms(self, reads: Reads) -> tuple[float | None, ...]:
        """Return the seconds of each term of a token: layers, waits, VRAM, memory, drive, link.

        None for a term of an unknown rate.
        """
        terms = self.units * self.factors * reads
        return tuple(
            max(0.0, float(term)) if is_known or not length else None
            for term, is_known, length in zip(terms, self.is_known, reads, strict=True)
        )

    def estimate(self, reads: Reads, rel_std: float, least: float) -> Estimate | None:
        """Return the time of a token: at least `least`, the bound by the bandwidths themselves.

        A run differs from its terms by `rel_std`. None if a term is not known.
        """
        if None in self.terms(reads):
            return None
        terms = self.units * reads
        seconds = max(least, float(terms @ self.factors), _LEAST_SHARE * float(terms.sum()))
        variance = float(terms @ self.covariance @ terms) + (rel_std * seconds) ** 2
        return Estimate(seconds, math.sqrt(variance))


def ceiling_seconds(machine: Machine, reads: Reads, drive: DriveSpeed | None) -> float | None:
    """Return the time of a token at full bandwidths, that of the `drive` too, with no other cost.

    The drive may read all the while. None if a bandwidth is not known; a link that is not known
    takes no time.
    """
    link = machine.link or Figure(math.inf, "typed")
    vram_bandwidth, read_bandwidth = machine.highest_vram_bandwidth, drive and drive.bandwidth
    bandwidths = vram_bandwidth, machine.memory_bandwidth, read_bandwidth, link
    vram, memory, read, moved = (
        0.0 if not length else None if bandwidth is None else length / bandwidth.value
        for length, bandwidth in zip(reads[2:], bandwidths, strict=True)
    )
    if vram is None or memory is None or read is None or moved is None:
        return None
    return max(vram + memory + moved, read)


def together(*factors: float) -> float:
    """Return the factor of several independent ones, each 1 or more, as sure as each of them."""
    return math.exp(math.hypot(*(math.log(max(1.0, factor)) for factor in factors)))


def _is_measured(figure: Figure | None) -> bool:
    return figure is not None and figure.basis == "measured"
