"""Sealed records, of finished files and others: a damaged one is known as such."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from moepack.common.fields import parse_strictly
from moepack.pack.format import manifest
from moepack.storage.extents import Extent, FinishedFile, NewFile

MAX_LENGTH = 20 << 20
"""Of a record: the digests of a million parts are 16 MiB of text."""


def seal(entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of a record, a digest of themselves among them."""
    return manifest.seal(dict(entry))


def unseal(data: bytes) -> dict[str, Any] | None:
    """Return the values of a record; None if it is not as it was written."""
    try:
        entry: dict[str, Any] = parse_strictly(data)
        del entry["manifest_digest"]
        return entry if seal(entry) == data else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def to_json(file: FinishedFile) -> dict[str, str]:
    """Return a finished file as its record states it."""
    return {"name": file.name, "digests": file.digests.tobytes().hex()}


def from_json(entry: Mapping[str, Any]) -> FinishedFile:
    """Read a finished file; raise KeyError, TypeError or ValueError if it makes no sense."""
    return FinishedFile(str(entry["name"]), array("Q", bytes.fromhex(entry["digests"])))


def on_disk(file: NewFile, finished: FinishedFile) -> NewFile | None:
    """Return a planned file with the digests of its extents; None if these are of another."""
    if len(finished.digests) != sum(1 for _ in file.extents()):
        return None
    return file._replace(extents=partial(_with_digests, file, finished.digests))


def _with_digests(file: NewFile, digests: Sequence[int]) -> Iterator[Extent]:
    for extent, digest in zip(file.extents(), digests, strict=True):
        yield extent._replace(digest=digest)
