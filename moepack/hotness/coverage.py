"""How many bytes of experts cover how much of what was measured.

The experts are ranked by what was learned, and the coverage is measured on what was held out, where
there is that: ranked by the very counts that they are measured by, experts always look better.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moepack.hotness.file import Hotness

PERCENTS = (50, 80, 90, 95, 99)
Counts = Mapping[tuple[int, int], int]


def of_hotness(heat: Hotness, lengths: Counts) -> dict[str, Any]:
    """Measure hotness; `lengths` are the bytes of each expert's blob, by (layer, expert)."""
    held = heat.held_out
    if held is None:
        return of(heat.counts, heat.counts, lengths) | {"held_out": None, "token_count": None}
    facts = {"held_out": held.by, "token_count": held.token_count}
    return of(heat.learned(), held.counts, lengths) | facts


def of(learned: Counts, measured: Counts, lengths: Counts) -> dict[str, Any]:
    """Rank experts by `learned`, as a pack does; measure by `measured`.

    In what is given, `lengths` has for each `percent` of the selections the bytes of the experts
    that it takes, and `total_length` is that of all. Experts that `learned` lacks come last, in the
    order of their numbers. A length is None where the experts do not reach that percent.
    """
    keys = sorted(lengths)
    blob_lengths = np.array([lengths[key] for key in keys], np.int64)
    rank = np.array([learned.get(key, 0) for key in keys], np.int64)
    order = np.argsort(-rank, kind="stable")
    reached = np.cumsum([measured.get(keys[n], 0) for n in order])
    total = sum(measured.values())
    sizes = np.cumsum(blob_lengths[order])
    rows = []
    for percent in PERCENTS:
        place = int(np.searchsorted(reached, total * percent / 100)) if total else len(keys)
        length = int(sizes[place]) if place < len(keys) else None
        rows.append({"percent": percent, "length": length})
    return {"lengths": rows, "total_length": int(sizes[-1]) if keys else 0}
