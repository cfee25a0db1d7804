"""One pass over a trace: the curves of LRU, and the lookups kept for what needs more passes."""

from typing import NamedTuple

from moepack.simulation.curves import LruCurves
from moepack.simulation.lookups import Lookups
from moepack.simulation.spool import Spool


class OnePass(NamedTuple):
    """Takes the lookups of a trace to `curves` and a `spool`."""

    curves: LruCurves
    spool: Spool

    def add(self, lookups: Lookups) -> None:
        """Take the next lookups."""
        self.curves.add(lookups)
        self.spool.add(lookups)
