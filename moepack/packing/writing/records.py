"""Sealed records, of finished files and others: a damaged one is known as such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moepack.common.fields import parse_strictly
from moepack.pack.format import manifest

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
