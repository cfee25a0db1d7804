"""New files as a list of what is copied into them: the one shape of all that moepack writes.

A pack's data files, restored shards and exported models are all this: ranges of input files at
planned offsets, and zeros between them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from moepack.storage.clone import BLOCK

RUN_LENGTH = 8 << 20
"""About how many bytes of a new file are written in one go."""


class Extent(NamedTuple):
    """`length` bytes at `input_offset` of an input, and where they go.

    `offset` counts from the start of the new file, `input` is the number of the input file. Where
    it is known what they are, `digest` is that of the bytes; `label` is what a message calls them.
    Where what lies in the input is a frame that they are decoded from, `frame_length` is its bytes.
    """

    offset: int
    length: int
    input: int
    input_offset: int
    digest: int | None = None
    label: str = ""
    frame_length: int = 0

    @property
    def end(self) -> int:
        """Where it ends in the new file."""
        return self.offset + self.length

    @property
    def is_blocks(self) -> bool:
        """Whether it is the same whole blocks in both files, which can be shared."""
        is_aligned = (self.offset | self.length | self.input_offset) % BLOCK == 0
        return self.length > 0 and is_aligned and not self.frame_length


class NewFile(NamedTuple):
    """A file to write: its plain name, its length in bytes, and what is copied into it.

    `extents` gives them anew with each call, by rising offsets; what is between them is zeros.
    """

    name: str
    length: int
    extents: Callable[[], Iterable[Extent]]


class Run(NamedTuple):
    """A piece of a new file that is written in one go: from `start` to `end`, zeros included.

    `first` is the number of its first extent within the file.
    """

    start: int
    end: int
    first: int
    extents: tuple[Extent, ...]
    is_last: bool


def runs(file: NewFile, length: int = RUN_LENGTH) -> Iterator[Run]:
    """Cut a file into runs of about `length` bytes; an extent is never cut."""
    start = number = 0
    pending: list[Extent] = []
    for extent in file.extents():
        if pending and extent.end - start > length:
            yield Run(start, extent.offset, number, tuple(pending), is_last=False)
            number += len(pending)
            start, pending = extent.offset, []
        pending.append(extent)
    yield Run(start, file.length, number, tuple(pending), is_last=True)
