"""Parts of a machine that tests need: without them a test is skipped by name."""

import platform
from pathlib import Path

import pytest

from moepack.running.programs.compiling import find_compiled
from moepack.running.programs.library import native_folder
from moepack.storage.open_files import lies_in_memory
from tests.support import llama_cpp


def _why_no_library() -> str | None:
    """Return why no libraries are beside their sources, where each run of the tests puts them."""
    native = native_folder()
    is_there = find_compiled(native, "seam", native, platform.machine()) is not None
    return None if is_there else "no library of native/: a C compiler is missing"


def _why_no_llama() -> str | None:
    """Return why no program of llama.cpp can be run with its experts brought by moepack."""
    reason = llama_cpp.why_not()
    return _why_no_library() if reason is None else f"no llama.cpp: {reason}"


needs_library = pytest.mark.skipif(_why_no_library() is not None, reason=str(_why_no_library()))
needs_llama = pytest.mark.skipif(_why_no_llama() is not None, reason=str(_why_no_llama()))


def require_llama() -> None:
    """Skip the running test without llama.cpp."""
    if (reason := _why_no_llama()) is not None:
        pytest.skip(reason)


def require_disk(path: Path) -> None:
    """Skip the test if files of the folder `path` lie in memory, which knows no cold reads."""
    if lies_in_memory(path):
        pytest.skip("temporary files lie in memory here (TMPDIR)")
