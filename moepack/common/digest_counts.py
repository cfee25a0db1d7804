"""How many bytes of parts were compared with their digests in this run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DigestCounts:
    """Bytes of parts, tensors and headers that a command has written, kept or shared.

    `known_length` are those with a known digest, `unknown_length` the others. Only code that has
    computed digests in this run, and found them equal, adds to `compared_length`.
    """

    known_length: int = 0
    unknown_length: int = 0
    compared_length: int = 0

    def __add__(self, other: DigestCounts) -> DigestCounts:
        """Return the counts of both."""
        return DigestCounts(
            self.known_length + other.known_length,
            self.unknown_length + other.unknown_length,
            self.compared_length + other.compared_length,
        )
