"""How an expert is named, in all rooms alike."""

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """An expert by its layer (the N of `blk.N.`) and its number there, which is the router's."""

    layer: int
    expert: int
