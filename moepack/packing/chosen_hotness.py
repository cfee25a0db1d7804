"""The hotness that orders a pack, and whether it is of this model."""

import os

from moepack.hotness.model import Hotness
from moepack.shape import ModelShape


def load_hotness(
    hotness: str | os.PathLike[str] | Hotness | None, shape: ModelShape
) -> Hotness | None:
    """Return the hotness to pack with; None where none was given.

    Raises TraceError where it is another model's.
    """
    if hotness is None:
        return None
    if not isinstance(hotness, Hotness):
        from moepack.hotness import measure  # here, since it brings numpy

        hotness = measure.load(os.fspath(hotness), shape)
    hotness.check_fits(shape)
    return hotness
