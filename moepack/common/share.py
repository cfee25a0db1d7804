"""The share of work that one of many machines does."""

import re
from collections.abc import Mapping

from moepack.common.errors import RequestError

_SHARE = re.compile(r"\s*([0-9]{1,6})\s*/\s*([0-9]{1,6})\s*\Z", re.ASCII)


class Share:
    """Share `number` of `count`, from 1, as `3/16` or (3, 16); RequestError for anything else."""

    def __init__(self, part: str | tuple[int, int]) -> None:
        match = _SHARE.match(part) if isinstance(part, str) else None
        numbers = (int(match[1]), int(match[2])) if match else part
        if isinstance(numbers, str) or not 1 <= numbers[0] <= numbers[1]:
            raise RequestError(
                "not a part", argument="part", expected="3/16, from 1/16 to 16/16", found=repr(part)
            )
        self.number, self.count = numbers

    def has(self, position: int, total: int) -> bool:
        """Return whether what begins at `position` of `total` bytes is in this share.

        Each position is in one share alone, and all shares have like lengths.
        """
        return min(position, total - 1) * self.count // total == self.number - 1

    @property
    def others(self) -> list[int]:
        """The numbers of all other shares."""
        return [number for number in range(1, self.count + 1) if number != self.number]

    def names(self, lengths: Mapping[str, int]) -> list[str]:
        """Return the names of the files in this share, by the lengths of all.

        Each file is in one share alone, whoever computes it, and all shares have like lengths.
        """
        loads = [0] * self.count
        names = []
        for name in sorted(lengths, key=lambda name: (-lengths[name], name)):
            number = loads.index(min(loads))
            loads[number] += lengths[name]
            if number == self.number - 1:
                names.append(name)
        return sorted(names)
