"""The files that a copy reads from: open, watched, and errors by whose fault it is."""

import os
from collections.abc import Sequence
from typing import NamedTuple, Self

from moepack import digest
from moepack.errors import MachineError, MoepackError, read_failure
from moepack.storage.extents import Extent
from moepack.storage.regular_file import FileStamp, NotRegularError, open_regular


class InputFile(NamedTuple):
    """A file that is read; `stamp` is what it was when it was planned, None where that is open."""

    path: str
    stamp: FileStamp | None = None


class Inputs:
    """The open input files of a copy, for positioned reads from any thread.

    `fault` is the error for an input that cannot be read, is too short or has changed. `data` are
    inputs that are in memory; their numbers follow those of the files.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        fault: type[MoepackError],
        data: Sequence[bytes] = (),
    ) -> None:
        self._files = files
        self._data = data
        self._fault = fault
        self._descriptors: list[int] = []

    def __enter__(self) -> Self:
        try:
            for file in self._files:
                self._descriptors.append(self._open(file.path))
            self.check_unchanged()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _open(self, path: str) -> int:
        try:
            return open_regular(path)
        except FileNotFoundError:
            raise self._fault("the file is missing", path=path) from None
        except NotRegularError as error:
            raise self._fault("not a regular file", path=path, found=error.kind) from None
        except OSError as error:
            raise MachineError(f"cannot open: {error.strerror}", path=path) from None

    def read_into(self, number: int, offset: int, buffer: memoryview) -> int:
        """Read up to len(buffer) bytes from `offset` of an input; 0 never comes back."""
        if number >= len(self._files):
            data = self._data[number - len(self._files)][offset : offset + len(buffer)]
            buffer[: len(data)] = data
            return len(data)
        path, place = self._files[number].path, f"byte {offset:,}"
        try:
            length = os.preadv(self._descriptors[number], [buffer], offset)
        except OSError as error:
            raise read_failure(error, path, self._fault, place) from error
        if not length:
            raise self._fault("the file became shorter", path=path, place=place)
        return length

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes from `offset` of an input."""
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            done += self.read_into(number, offset + done, view[done:])
        return bytes(data)

    def descriptor(self, number: int) -> int | None:
        """Return the descriptor of an input; None of one in memory."""
        return self._descriptors[number] if number < len(self._files) else None

    def damaged(self, extent: Extent, computed: int) -> MoepackError:
        """Return the error for an extent that does not have its digest."""
        assert extent.digest is not None
        return self._fault(
            "the bytes do not have the digest in the index",
            path=self._files[extent.input].path,
            place=f"{extent.label} at byte {extent.input_offset:,}",
            expected=digest.to_text(extent.digest),
            found=digest.to_text(computed),
            hint="run `moepack verify` on the pack",
        )

    def undecodable(self, extent: Extent, problem: str) -> MoepackError:
        """Return the error for an extent whose frame is not what it has to be."""
        return self._fault(
            f"the bytes cannot be decoded: {problem}",
            path=self._files[extent.input].path,
            place=f"{extent.label} at byte {extent.input_offset:,}",
            hint="run `moepack verify` on the pack",
        )

    def check_unchanged(self) -> None:
        """Raise `fault` where an input is not the file any more that was planned with."""
        for file, descriptor in zip(self._files, self._descriptors, strict=True):
            if file.stamp is not None and not _is_unchanged(file, descriptor):
                raise self._fault(
                    "the file changed while it was being read",
                    path=file.path,
                    hint="wait until it is complete, then begin again from the start",
                )


def _is_unchanged(file: InputFile, descriptor: int) -> bool:
    """Say whether both the open file and the one at its path are what was planned with."""
    try:
        at_path = FileStamp.of(os.stat(file.path))
    except OSError:
        return False
    return FileStamp.of(os.fstat(descriptor)) == file.stamp == at_path
