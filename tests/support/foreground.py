"""Run a command in the foreground as `moepack run` does: `python -m tests.support.foreground`."""

import os
import sys
from pathlib import Path

import numpy as np

from moepack.running.programs.process import end_like, in_foreground

MODULE = (sys.executable, "-m", "tests.support.foreground")


def main(*arguments: str) -> int:
    """Run `arguments`, beside threads that are no one's to signal."""
    assert np.ones((64, 64)) @ np.ones((64, 64)) is not None
    with in_foreground(Path(arguments[0]), arguments, os.environ) as process:
        os.write(2, f"pid {process.pid}\n".encode())
        returncode = process.wait()
    assert returncode is not None
    return end_like(returncode)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
