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


_NO_LIBRARY = _why_no_library()
_NO_LLAMA = _NO_LIBRARY
if (_reason := llama_cpp.why_not()) is not None:
    _NO_LLAMA = f"no llama.cpp: {_reason}"

needs_library = pytest.mark.skipif(_NO_LIBRARY is not None, reason=str(_NO_LIBRARY))
needs_llama = pytest.mark.skipif(_NO_LLAMA is not None, reason=str(_NO_LLAMA))


def require_llama() -> None:
    """Skip the running test where no program of llama.cpp can be run with moepack's experts."""
    if _NO_LLAMA is not None:
        pytest.skip(_NO_LLAMA)


def require_disk(path: Path) -> None:
    """Skip the test if files of the folder `path` lie in memory, which knows no cold reads."""
    if lies_in_memory(path):
        pytest.skip("temporary files lie in memory here (TMPDIR)")
