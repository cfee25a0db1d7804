"""What of a machine a test cannot do without: where it lacks that, the test is skipped by name."""

import pytest

from tests.support import llama_cpp

_NO_LLAMA_CPP = f"no llama.cpp: {llama_cpp.why_not()}"

needs_llama = pytest.mark.skipif(llama_cpp.why_not() is not None, reason=_NO_LLAMA_CPP)


def require_llama() -> None:
    """Skip the test that gets this far where there is no llama.cpp."""
    if llama_cpp.why_not() is not None:
        pytest.skip(_NO_LLAMA_CPP)
