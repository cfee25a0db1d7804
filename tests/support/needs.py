"""Parts of a machine that tests need: without them a test is skipped by name."""

from pathlib import Path

import pytest

from moepack.storage.open_files import lies_in_memory
from tests.support import llama_cpp

_NO_LLAMA_CPP = f"no llama.cpp: {llama_cpp.why_not()}"

needs_llama = pytest.mark.skipif(llama_cpp.why_not() is not None, reason=_NO_LLAMA_CPP)


def require_llama() -> None:
    """Skip the running test without llama.cpp."""
    if llama_cpp.why_not() is not None:
        pytest.skip(_NO_LLAMA_CPP)


def require_disk(path: Path) -> None:
    """Skip the test if files of the folder `path` lie in memory, which knows no cold reads."""
    if lies_in_memory(path):
        pytest.skip("temporary files lie in memory here (TMPDIR)")
