"""Small packs to damage, for all tests of this room."""

from tests.support.light_folder import tmp_path
from tests.support.pack_draft import draft, tiny

__all__ = ["draft", "tiny", "tmp_path"]
