"""Folders of tests of this room, which need no disk."""

from tests.support.light_folder import tmp_path

__all__ = ["tmp_path"]
