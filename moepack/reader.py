"""Read experts: from (layer, expert, part) to bytes in memory.

A Reader turns keys into read requests, hands them to a backend, checks what came back and names
what failed. How the bytes come from the disk is the backend's.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, Self

from moepack import digest
from moepack.backends import Backend, BufferedBackend, Completion, ReadRequest
from moepack.errors import MachineError, PackError, RequestError

if TYPE_CHECKING:
    from moepack.pack import BlobLocation, Pack, PartLocation


class Reader:
    """Reads blobs and parts of one pack; `pack.reader()` makes it, `close` or `with` ends it.

    With `check_digests` each part that is read is compared with its digest, and one flipped bit is
    an error. May be used from several threads.
    """

    def __init__(self, pack: Pack, *, check_digests: bool = True) -> None:
        self._pack = pack
        self._check_digests = check_digests
        self._backend: Backend | None = BufferedBackend()

    @property
    def backend(self) -> str:
        """The name of the backend that reads."""
        return self._open_backend().name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the data files. Views that were given out stay valid."""
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def read(
        self, layer: int, expert: int, part: str | None = None, *, family: str | None = None
    ) -> memoryview:
        """Read a whole blob, padding included, or exactly one part's bytes.

        The view is writable, starts on a memory page and is the caller's: nothing else uses it.
        Raises RequestError for what the pack does not hold, PackError for a file that is shorter
        than the index says or a digest that differs, MachineError when the system cannot read.
        """
        where = self._locate(layer, expert, part, family)
        # An anonymous mapping starts on a page, which direct I/O and GPU copies need.
        try:
            buffer = memoryview(mmap.mmap(-1, where.length))
        except (OSError, OverflowError) as error:
            problem = f"cannot allocate {where.length} bytes ({error})"
            raise MachineError(problem, path=where.path, place=_place(where)) from None
        self._fill(where, buffer)
        return buffer

    def read_into(
        self,
        buffer: Any,
        layer: int,
        expert: int,
        part: str | None = None,
        *,
        family: str | None = None,
    ) -> int:
        """Read like `read` into the start of the caller's `buffer`; give the length in bytes.

        `buffer` is anything with a writable, contiguous buffer (bytearray, mmap, numpy array). What
        lies behind the length is left alone. Raises RequestError where it is too small.
        """
        where = self._locate(layer, expert, part, family)
        view = memoryview(buffer).cast("B")
        if view.readonly or len(view) < where.length:
            found = "a read-only one" if view.readonly else f"{len(view)} bytes"
            raise RequestError(
                "the buffer does not fit",
                place=_place(where),
                expected=f"{where.length} writable bytes",
                found=found,
            )
        self._fill(where, view[: where.length])
        return where.length

    def _locate(
        self, layer: int, expert: int, part: str | None, family: str | None
    ) -> BlobLocation | PartLocation:
        if part is None:
            return self._pack.locate(layer, expert, family=family)
        return self._pack.locate(layer, expert, part)

    def _open_backend(self) -> Backend:
        if self._backend is None:
            raise RequestError("the reader is closed", path=self._pack.path)
        return self._backend

    def _fill(self, where: BlobLocation | PartLocation, buffer: memoryview) -> None:
        request = ReadRequest(where.path, where.offset, buffer)
        for completion in self._open_backend().read([request]):
            _check_completion(completion, where)
        if self._check_digests:
            self._check(where, buffer)

    def _check(self, where: BlobLocation | PartLocation, buffer: memoryview) -> None:
        for part in self._parts(where):
            start = part.offset - where.offset
            found = digest.of(buffer[start : start + part.length])
            if found != part.digest:
                raise PackError(
                    "the bytes do not have the digest in the index",
                    path=part.path,
                    place=_place(part),
                    expected=digest.to_text(part.digest),
                    found=digest.to_text(found),
                    hint="run `moepack verify` on the pack",
                )

    def _parts(self, where: BlobLocation | PartLocation) -> list[PartLocation]:
        family = getattr(where, "family", None)
        if family is None:
            return [where]  # type: ignore[list-item]
        kinds = self._pack.parts(where.layer, family=family)
        return [self._pack.locate(where.layer, where.expert, kind.name) for kind in kinds]


def _place(where: BlobLocation | PartLocation) -> str:
    what = getattr(where, "part", "blob")
    return f"layer {where.layer} expert {where.expert} {what} at byte {where.offset}"


def _check_completion(completion: Completion, where: BlobLocation | PartLocation) -> None:
    error = completion.error
    if isinstance(error, FileNotFoundError):
        raise PackError("a data file is missing", path=where.path, place=_place(where))
    if error is not None:
        raise MachineError(
            f"cannot read: {error.strerror}", path=where.path, place=_place(where)
        ) from error
    if completion.length < where.length:
        raise PackError(
            "the file ends too early",
            path=where.path,
            place=_place(where),
            expected=f"{where.length} bytes",
            found=completion.length,
        )
