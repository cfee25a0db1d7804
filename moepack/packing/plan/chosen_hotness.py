"""The hotness that orders a pack, and whether it is of this model."""

import os

from moepack.common.shape import ModelShape
from moepack.traces.hotness.model import Hotness


def load_hotness(
    hotness: str | os.PathLike[str] | Hotness | None, shape: ModelShape
) -> Hotness | None:
    """Return the hotness to pack with; None without one.

    Raises TraceError if it is another model's.
    """
    if hotness is None:
        return None
    if not isinstance(hotness, Hotness):
        from moepack.traces.hotness import measure  # here, since it brings numpy

        hotness = measure.load(os.fspath(hotness), shape)
    hotness.check_fits(shape)
    return hotness
