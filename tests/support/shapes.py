"""Shapes of models that tests make up."""

from collections.abc import Mapping

from moepack.common.shape import ROUTED_FAMILY, FamilyShape, ModelShape


def shape_of_counts(counts: Mapping[int, int], length: int = 1) -> ModelShape:
    """Make a model with so many experts by layer, each of `length` bytes."""
    families = (
        FamilyShape(layer, ROUTED_FAMILY, count, length) for layer, count in sorted(counts.items())
    )
    return ModelShape(tuple(families))
