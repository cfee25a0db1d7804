"""How the memory that a model may take is divided: dense part, context, experts."""

from typing import NamedTuple

from moepack.errors import RequestError
from moepack.shape import ModelShape
from moepack.sizes import size_text


class Needs(NamedTuple):
    """What a model needs in bytes: `dense` and `context` always, experts as far as there is room.

    `step` is what one token's experts take in all layers, `experts` all of them, without padding.
    """

    dense: int
    context: int
    step: int
    experts: int

    @property
    def floor(self) -> int:
        """The least memory that it runs in: less would mean to read each expert each time."""
        return self.dense + self.context + self.step

    @property
    def all(self) -> int:
        """What it takes with all experts."""
        return self.dense + self.context + self.experts

    def budget(self, memory: int | None, available: int) -> int:
        """Return the bytes for experts, when `memory` is for all; None for what is `available`.

        Raises RequestError below the floor.
        """
        given = available if memory is None else memory
        if given < self.floor:
            parts = f"{size_text(self.dense)} dense, {size_text(self.context)} context"
            raise RequestError(
                "too little memory for this model",
                expected=f"{size_text(self.floor)} ({parts}, {size_text(self.step)} experts of "
                "one token)",
                found=size_text(given),
                hint="`--memory floor` takes the least; a shorter --context needs less",
            )
        return min(given, self.all) - self.dense - self.context


def step_length(shape: ModelShape) -> int:
    """Return the bytes of the experts that one token uses in all layers.

    Where a model does not say how many it uses, they are all.
    """
    return sum(
        family.expert_length * (family.experts_used or family.expert_count)
        for family in shape.routed.values()
    )


def largest_batch(shape: ModelShape, room: int, most: int) -> int:
    """Return how many tokens, up to `most`, choose experts of up to `room` bytes in any layer.

    At least 1: one token's experts of a layer are held whatever they take.
    """
    count = most
    for family in shape.routed.values():
        fitting = room // max(1, family.expert_length)
        if fitting < family.expert_count:
            count = min(count, fitting // (family.experts_used or family.expert_count))
    return max(1, count)
