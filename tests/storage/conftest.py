"""Files to read, for all tests of this room."""

from tests.support.reads import files, held

__all__ = ["files", "held"]
