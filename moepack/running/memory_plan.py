"""How the memory that a model may take is divided: dense part, context, experts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moepack.errors import RequestError
from moepack.shape import ModelShape
from moepack.sizes import size_text

_LEAST_MARGIN = 512 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


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


def available_memory() -> int:
    """Return the bytes that this process may still take, less a margin for all else.

    Of what the system has available and what each limit of its control groups leaves, the least;
    the margin is a tenth, at least 512 MiB. The sources: proc(5), cgroups(7).
    """
    least = min([_system_memory(), *_left_by_limits()])
    return max(0, least - max(_LEAST_MARGIN, least // 10))


def _system_memory() -> int:
    try:
        fields = Path("/proc/meminfo").read_text().split()
        return int(fields[fields.index("MemAvailable:") + 1]) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_by_limits() -> Iterator[int]:
    """Yield what each limit on memory leaves of this process's groups, of both versions."""
    try:
        groups = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, limit, usage = _CGROUPS / "memory", "limit_in_bytes", "usage_in_bytes"
        elif not controllers:
            root, limit, usage = _CGROUPS, "max", "current"
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            left = _left(folder / f"memory.{limit}", folder / f"memory.{usage}")
            if left is not None:
                yield left
            if folder in (root, folder.parent):
                break
            folder = folder.parent


def _left(limit: Path, usage: Path) -> int | None:
    """Return what a group has left; what it has in the page cache can go, and is not counted."""
    try:
        text = limit.read_text().strip()
        if text == "max":
            return None
        return max(0, int(text) - int(usage.read_text()) + _cached(usage.parent))
    except (OSError, ValueError):
        return None


def _cached(group: Path) -> int:
    """Return the bytes of files that a group has read and does not use."""
    try:
        stat = (group / "memory.stat").read_text().split()
        return int(stat[stat.index("inactive_file") + 1])
    except (OSError, ValueError):
        return 0
