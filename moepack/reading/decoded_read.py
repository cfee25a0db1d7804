"""What is read of an expert some of whose parts are stored by a codec, and how they are decoded.

Parts that are stored as they are, are read to their place like any others. The stored bytes of the
others, their frames, are read into scratch memory, and decoded from there to theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.errors import MachineError, MoepackError, PackError
from moepack.reading.expert_read import PAGE, ExpertRead

if TYPE_CHECKING:
    from pathlib import Path

    from moepack.reading.expert_read import FileRead, Memory, ScatteredMemory
    from moepack.reading.locations import PartSpan
    from moepack.storage.backend import ReadRequest


class DecodedRead(ExpertRead):
    """What is to be read of an expert: first what is taken as it lies, then its `frames`.

    The frames' parts and reads are those of their own scratch memory.
    """

    __slots__ = ()

    @property
    def lead(self) -> int:
        """How far behind the start of a page what is taken as it lies begins in memory of ours."""
        return 0 if self._is_decoded_alone else self.file_reads[0].lead

    @property
    def pages_length(self) -> int:
        """The bytes of all pages that it takes."""
        return (self.lead + self.length + PAGE - 1) // PAGE * PAGE

    @property
    def _is_decoded_alone(self) -> bool:
        return len(self.stored.file_reads) == len(self.file_reads)

    @property
    def stored(self) -> ExpertRead:
        """The reads of the frames, into memory of their own."""
        assert self.frames is not None
        return self.frames

    def _is_of_frames(self, file_read: FileRead) -> bool:
        return file_read in self.stored.file_reads

    def place_in(
        self, file_read: FileRead, memory: Memory | ScatteredMemory, scratch: Memory
    ) -> Memory | ScatteredMemory:
        """Return where one of the reads goes: to the expert's memory, or to that of frames."""
        return scratch if self._is_of_frames(file_read) else memory

    def request(self, file_read: FileRead, memory: Memory | ScatteredMemory) -> ReadRequest:
        """Return what a backend is asked for one of the reads; `memory` is where it goes."""
        if self._is_of_frames(file_read):
            return self.stored.request(file_read, memory)
        return super().request(file_read, memory)

    def received(self, file_read: FileRead, memory: Memory | ScatteredMemory, got: int) -> int:
        """Return how many of a read's own bytes came, when its request got so many."""
        if self._is_of_frames(file_read):
            return self.stored.received(file_read, memory, got)
        return super().received(file_read, memory, got)

    def place(self, file_read: FileRead) -> str:
        """Return what a message calls one of the reads."""
        if self._is_of_frames(file_read):
            return self.stored.place(file_read)
        return super().place(file_read)

    def place_of(self, part: PartSpan) -> tuple[Path, str]:
        """Return the file of one of the parts, and what a message calls its place there."""
        for frame in self.stored.parts:
            if frame.name == part.name:
                return self.stored.place_of(frame)
        return super().place_of(part)

    def decode(
        self, frame: PartSpan, memory: Memory | ScatteredMemory, scratch: Memory
    ) -> MoepackError | None:
        """Decode one of the frames to its part; return what is wrong with it, None for nothing.

        It is returned, since the traceback of what is raised would hold the memory.
        """
        from moepack.storage.frames import FrameError, decompress_into

        path, place = self.stored.place_of(frame)
        try:
            decompress_into(scratch.part(frame), memory.part(self.part(frame.name)))
        except FrameError as error:
            return PackError(
                f"the part cannot be decoded: {error}",
                path=path,
                place=place,
                hint="run `moepack verify` on the pack",
            )
        except MemoryError:
            return MachineError("no memory is left to decode the part", path=path, place=place)
        return None
