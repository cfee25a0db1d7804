"""moepack.h, compiled as its users do: with every warning an error."""

import shutil
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).parents[2] / "include" / "moepack.h"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")
POSIX = ("-D_POSIX_C_SOURCE=200809L", "-D_FILE_OFFSET_BITS=64", f"-I{HEADER.parent}")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


def compiled(compiler: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a compiler with all warnings as errors; skip where there is none."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    command = [compiler, *WARNINGS, *POSIX, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
