"""One shard of the source as it was, read from where its bytes lie in a pack.

Reads go through the page cache and their digests are not compared: the kernel asks for ranges that
are shorter than a part.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from moepack.errors import MoepackError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moepack.reading.shard_map import ShardMap, ShardPiece
    from moepack.storage.inputs import Inputs


class ShardView:
    """The bytes of one shard; may be read from several threads.

    `inputs` are the files of the pack, in the order of its index.
    """

    def __init__(self, shard: ShardMap, inputs: Inputs) -> None:
        self.name = shard.name
        self.length = shard.length
        self._pieces = shard.pieces
        self._starts = [piece.shard_offset for piece in shard.pieces]
        self._inputs = inputs

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes from `offset` of the shard, as far as that goes.

        Returns how many there are, fewer than the view has only where the shard ends. Raises
        PackError or MachineError, naming the part or tensor, for what cannot be read.
        """
        length = max(0, min(len(view), self.length - offset))
        done = 0
        for piece in self._pieces_in(offset, offset + length):
            first = max(piece.shard_offset - offset, 0)
            last = min(piece.end - offset, length)
            view[done:first] = bytes(first - done)
            place = piece.offset + offset + first - piece.shard_offset
            self._fill(view[first:last], piece, place)
            done = last
        view[done:length] = bytes(length - done)
        return length

    def _pieces_in(self, offset: int, end: int) -> Iterator[ShardPiece]:
        for number in range(max(0, bisect_right(self._starts, offset) - 1), len(self._pieces)):
            piece = self._pieces[number]
            if piece.shard_offset >= end:
                return
            if piece.end > offset:
                yield piece

    def _fill(self, view: memoryview, piece: ShardPiece, place: int) -> None:
        try:
            while view:
                length = self._inputs.read_into(piece.file, place, view)
                view, place = view[length:], place + length
        except MoepackError as error:
            error.place = f"{piece.label} at byte {piece.offset:,}"
            raise
