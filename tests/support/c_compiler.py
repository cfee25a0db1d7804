"""moepack.h, compiled as its users do: with every warning an error."""

import shutil
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).parents[2] / "include" / "moepack.h"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")
POSIX = ("-D_POSIX_C_SOURCE=200809L", "-D_FILE_OFFSET_BITS=64", f"-I{HEADER.parent}")
HAS_ZSTD = Path("/usr/include/zstd.h").exists()
"""Whether zstd for C is installed."""
ZSTD = ("-DMOEPACK_ZSTD", "-lzstd")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


def compiled(compiler: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a compiler with all warnings as errors, libraries last; skip where there is none."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    libraries = [str(one) for one in arguments if str(one).startswith("-l")]
    others = [str(one) for one in arguments if str(one) not in libraries]
    command = [compiler, *WARNINGS, *POSIX, *others, *libraries]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
