"""When what was read is compared with its digest: always, the first time, or never."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.errors import RequestError

if TYPE_CHECKING:
    from moepack.reading.expert_read import ExpertRead, Memory, ScatteredMemory

WHEN = ("always", "first", "never")


class DigestCheck:
    """Compares parts with their digests, for one reader.

    With `first` a part that was found right is not looked at again: a drive that gave the right
    bytes once is trusted from then on, and its bytes cost nothing more. The mirror's are checked
    for themselves. May be used from several threads.
    """

    def __init__(self, when: str) -> None:
        if when not in WHEN:
            raise RequestError("no such check", expected=", ".join(WHEN), found=repr(when))
        self._is_on = when != "never"
        self._right: set[tuple[int, int, str, bool]] | None = set() if when == "first" else None

    def check(
        self, read: ExpertRead, memory: Memory | ScatteredMemory, *, is_mirrored: bool
    ) -> None:
        """Compare the parts of `read` in `memory`; raise PackError for the first that differs."""
        if not self._is_on:
            return
        if self._right is None:
            read.check_digests(memory, read.parts)
            return
        parts = {(read.layer, read.expert, part.name, is_mirrored): part for part in read.parts}
        new = [part for key, part in parts.items() if key not in self._right]
        if new:
            read.check_digests(memory, new)
            self._right.update(parts)
