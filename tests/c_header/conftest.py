"""Small packs to damage, for all tests of this room."""

from tests.support.broken_packs import draft, tiny

__all__ = ["draft", "tiny"]
