"""All that a model takes in memory, from its files: weights, a context, room to compute in."""

from __future__ import annotations

from typing import NamedTuple

from moepack.footprint.attention import Attention, attention_of, states_attention
from moepack.footprint.compute import Widths, compute_length, widths_of
from moepack.footprint.context import DEFAULTS, Context, ContextOptions, context_of
from moepack.footprint.weights import Weights, source_named, weights_of, weights_of_source
from moepack.paths import PathOrPaths
from moepack.source.experts import Experts, find_experts
from moepack.source.shards import Source


class Footprint(NamedTuple):
    """What a model takes; None is what is not known.

    That is `attention` and `widths` of a pack of experts alone, and of metadata without them.
    """

    weights: Weights
    attention: Attention | None
    widths: Widths | None

    def context(self, options: ContextOptions = DEFAULTS) -> Context | None:
        """Return what a context takes, None where that is not known. Raises as `context_of`."""
        return None if self.attention is None else context_of(self.attention, options)

    def compute_length(self, options: ContextOptions = DEFAULTS) -> int | None:
        """Return about how many bytes a context takes to compute in; None where not known."""
        if self.attention is None or self.widths is None:
            return None
        return compute_length(self.widths, self.attention, options)


def footprint_of(paths: PathOrPaths) -> Footprint:
    """Return what a model takes: of a source, or of what a pack was made of.

    Arguments and errors are those of `weights_of`.
    """
    source = source_named(paths)
    if source is None:
        return Footprint(weights_of(paths), None, None)
    return footprint_of_source(source, find_experts(source))


def footprint_of_source(source: Source, experts: Experts) -> Footprint:
    """Return what a source takes whose experts are found already."""
    weights = weights_of_source(source, experts)
    widths = widths_of(source, experts, weights.shape)
    return Footprint(weights, attention_of(source) if states_attention(source) else None, widths)
