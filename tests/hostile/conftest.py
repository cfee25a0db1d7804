"""Small packs to damage, for all tests of this room."""

from tests.support.pack_draft import draft, tiny

__all__ = ["draft", "tiny"]
