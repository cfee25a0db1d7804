"""Files to read, for all tests of this room."""

from tests.support.reads import files, slow_file

__all__ = ["files", "slow_file"]
