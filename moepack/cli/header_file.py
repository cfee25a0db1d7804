"""Where moepack.h lies: in the installed package, or in the repository that is worked in."""

from pathlib import Path

from moepack.errors import MachineError

NAME = "moepack.h"


def folder() -> Path:
    """Give the folder to look for `moepack.h` in; raise MachineError where it was not installed."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "include", package.parent / "include"):
        if (candidate / NAME).is_file():
            return candidate
    raise MachineError("moepack.h was not installed", path=package, hint="install moepack again")
