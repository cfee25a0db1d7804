"""The C files of `native/`, compiled as a test needs them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from moepack.running.programs.compiling import SOURCES
from moepack.running.programs.library import native_folder
from tests.support.built import built
from tests.support.children import PATIENCE

NATIVE = native_folder()


def compile_with(compiler: str, *arguments: str | Path) -> None:
    """Compile without a word of the compiler; skip the test where it is not installed."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    run = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert (run.returncode, run.stderr) == (0, "")


def compiled_once(name: str, compiler: str, *arguments: str | Path) -> Path:
    """Return a file that is compiled as `compile_with` does, once for the same files and flags."""

    def make(target: Path) -> None:
        compile_with(compiler, *arguments, "-o", target)

    return built(name, make, compiler, *arguments)


def sources(name: str) -> list[Path]:
    """Return the C files of a library."""
    return [NATIVE / f"{one}.c" for one in SOURCES[name]]
