"""Miss-ratio curves of real models, kept as data for models without a trace."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moepack.common.shape import ModelShape

_FILE = Path(__file__).with_name("hit_curves.toml")
_OWN_SPREAD, _OTHER_SPREAD = 1.3, 1.6


class HitCurve(NamedTuple):
    """The share of lookups that miss, by the room for experts beyond those of one token.

    A text misses up to `spread` times as much or as little. `is_own` is whether it was simulated
    for a model of the same shape.
    """

    name: str
    rooms: tuple[float, ...]
    misses: tuple[float, ...]
    spread: float
    is_own: bool

    def share(self, step_length: int, total_length: int, budget: int) -> float:
        """Return the share that misses in a cache of `budget` bytes, all in bytes."""
        if budget < step_length:
            return 1 - (1 - self.misses[0]) * budget / step_length
        room = (budget - step_length) / max(1, total_length - step_length)
        return float(np.interp(room, self.rooms, self.misses))


def curve_for(shape: ModelShape) -> HitCurve:
    """Return the curve of a model of this shape, or that of another one."""
    layers, experts = len(shape.expert_counts), max(shape.expert_counts.values())
    return min(
        (_curve(body, (layers, experts)) for body in _curves()), key=lambda curve: curve.spread
    )


@cache
def _curves() -> list[dict[str, object]]:
    return list(tomllib.loads(_FILE.read_text())["curves"])


def _curve(body: dict[str, object], shape: tuple[int, int]) -> HitCurve:
    is_own = shape == (body["layers"], body["experts"])
    rooms, misses = np.array(body["rooms"]), np.array(body["misses"]) * body["factor"]
    spread = _OWN_SPREAD if is_own else _OTHER_SPREAD
    return HitCurve(str(body["name"]), tuple(rooms), tuple(misses), spread, is_own)
