"""A small library to preload."""

from pathlib import Path

import pytest

from moepack.running.programs.compiling import compile_library
from tests.support.preloaded import write_source


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a library that says when it is loaded."""
    folder = tmp_path_factory.mktemp("preloaded")
    return compile_library(write_source(folder), folder)
