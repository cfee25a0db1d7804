"""What is to be placed, and where."""

from __future__ import annotations

from typing import NamedTuple

from moepack.machine.model import Machine
from moepack.placing.facts import DeviceFacts, OptionFacts, PinFacts
from moepack.placing.load import Load


class Request(NamedTuple):
    """A model for an engine on a machine: `margin` bytes of each memory are left free.

    `context` is in tokens, its keys and values are of `cache_types`.
    """

    load: Load
    machine: Machine
    engine: str
    context: int
    margin: int
    cache_types: tuple[str, str]

    @property
    def rooms(self) -> list[int]:
        """What may be taken of each GPU."""
        return [max(0, int(gpu.memory.value) - self.margin) for gpu in self.machine.gpus]

    @property
    def memory_room(self) -> int:
        """What may be taken of memory."""
        return max(0, int(self.machine.memory.value) - self.margin)

    @property
    def working_length(self) -> int:
        """What is no expert's, where all is in memory."""
        device = self.memory_device(0)
        return device.dense_length + device.context_length + device.compute_length

    def memory_device(self, expert_length: int) -> DeviceFacts:
        """Return what lies in memory, where all of it does, with so many bytes of experts."""
        load = self.load
        return device_facts(
            "memory",
            int(self.machine.memory.value),
            load.weights.dense_length or 0,
            sum(layer.context_length for layer in load.layers),
            expert_length,
            load.compute_length,
        )


class Placement(NamedTuple):
    """What lies where, how to say so, and what else one could say.

    `notes` are what a reader has to know. `pins` says what pinning is worth, None where nothing is
    known of that.
    """

    devices: tuple[DeviceFacts, ...]
    option: OptionFacts
    alternatives: tuple[OptionFacts, ...] = ()
    notes: tuple[str, ...] = ()
    pins: PinFacts | None = None


def device_facts(
    name: str, length: int, dense: int, context: int, experts: int, computing: int
) -> DeviceFacts:
    """Return the facts of a device with what is left of it."""
    left = length - dense - context - experts - computing
    return DeviceFacts(name, length, dense, context, experts, computing, left)
